"""Whether a module keeps the promises: short runs of it, measured and held against one another."""
