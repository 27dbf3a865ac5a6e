"""Who started this process, and how the processes of a run meet and agree."""
