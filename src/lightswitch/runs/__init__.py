"""One run's directory: what it may be called, who writes it, and its log."""
