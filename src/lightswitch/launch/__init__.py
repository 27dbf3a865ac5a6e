"""The course of a run: the entry, the build, the stages, the report, and the exit code."""
