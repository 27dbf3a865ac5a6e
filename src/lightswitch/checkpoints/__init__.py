"""Writing, finding and checking checkpoints."""
