"""LightningDataModules with plain DataLoaders."""
