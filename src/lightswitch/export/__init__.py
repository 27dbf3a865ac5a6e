"""Weights for inference: written as safetensors or .pt, and read into a model (`lightswitch.load`)."""
