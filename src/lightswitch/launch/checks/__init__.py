"""What can be wrong with a request, by what it is about: generators of problems, a line each. None imports torch."""
