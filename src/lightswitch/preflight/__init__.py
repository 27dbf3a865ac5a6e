"""Checks of a request before a process is started: every problem that can be known by then. Imports no torch."""
