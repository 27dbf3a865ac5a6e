"""This process of a run: the ranks that it has started, the signals it receives, and how it ends."""
