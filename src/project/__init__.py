"""Models and data, in plain Lightning: conf names them, and the engine trains them."""
