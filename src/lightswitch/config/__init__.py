"""From the command line to a config: overrides as people type them, Hydra, and what its errors mean."""
