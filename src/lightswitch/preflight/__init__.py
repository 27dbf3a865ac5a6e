"""Checks of a run's config, launcher and devices before any process starts. Importing them does not import torch."""
