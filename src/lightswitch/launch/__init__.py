"""All that happens around fit: the command line, preflight, processes, the run directory, the report."""
