"""Config of a run: command-line overrides, Hydra's composition and its error messages, and confidential values."""
