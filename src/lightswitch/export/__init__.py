"""Weights for inference: export to safetensors, .pt or .ckpt files, and loading into a model (`lightswitch.load`)."""
