"""Sweeps: many runs from one command, each with its own processes and directory."""
