"""Strategies that distribute a model over processes."""
