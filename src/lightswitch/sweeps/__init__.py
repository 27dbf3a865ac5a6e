"""Sweeps: many runs from one command, each with processes and a directory of its own."""
