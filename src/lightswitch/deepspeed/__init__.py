"""DeepSpeed's ZeRO: the strategy, its config, and its state in the portable form of checkpoints."""
