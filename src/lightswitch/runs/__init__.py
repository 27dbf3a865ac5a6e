"""Directory of a run: its name, its lock, its record and its log."""
