"""LightningDataModules: plain DataLoaders over map-style datasets with a batched fast path."""
