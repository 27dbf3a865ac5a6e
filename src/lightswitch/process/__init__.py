"""This process of a run: the ranks that it has started, the signals it hears, and how it ends."""
