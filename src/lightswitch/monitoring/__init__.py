"""Monitoring: the progress that a run shows, and the metrics and times that it records."""
