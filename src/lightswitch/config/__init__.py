"""The config of a run: overrides as typed, Hydra's composition and its error messages, and confidential values."""
