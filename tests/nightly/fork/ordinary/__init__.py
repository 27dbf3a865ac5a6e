"""Models and data as a student brings them to a fork."""
