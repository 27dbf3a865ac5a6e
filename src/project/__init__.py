"""Models and data in plain Lightning, which the configs name and the engine trains."""
