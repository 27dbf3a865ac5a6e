"""DeepSpeed's ZeRO: the strategy, its config, and its state in portable checkpoints."""
