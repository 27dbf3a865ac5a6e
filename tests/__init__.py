"""The tests. A package, or one named tests that is installed would take its place."""
