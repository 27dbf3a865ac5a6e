"""Models and data. Plain Lightning, nothing of lightswitch."""
