"""Diagnosis of a machine, or of all nodes of a job: `python -m lightswitch.doctor`."""
