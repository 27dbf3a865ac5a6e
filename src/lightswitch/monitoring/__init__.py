"""What a run shows while it goes, and what it records."""
