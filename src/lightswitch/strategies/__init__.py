"""Strategies: the ways in which a model is spread over processes."""
