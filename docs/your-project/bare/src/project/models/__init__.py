"""LightningModules, which depend on torch, Lightning and torchmetrics, and on no strategy."""
