"""Examination of a machine, or of all nodes of a job, and what is wrong with them: `python -m lightswitch.doctor`."""
