"""The course of a run: entry point, construction, training and evaluation, report, and exit code."""
