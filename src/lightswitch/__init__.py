"""The engine: one training run, any strategy."""
