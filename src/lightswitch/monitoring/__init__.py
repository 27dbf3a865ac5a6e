"""Monitoring: what a run shows while it goes, and what it records."""
