"""LightningModules. They know torch, Lightning and torchmetrics, and no strategy."""
