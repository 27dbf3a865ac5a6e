"""What a machine, or all nodes of a job, can do, and what is wrong with them: `python -m lightswitch.doctor`."""
