"""The words that a key at the top of a config may be set to, where they are few."""

ALLOWED = {
    "mode": ("fit", "validate", "test", "predict", "plan"),
    "on_nan": ("stop", "skip", "ignore"),
    "matmul_precision": ("highest", "high", "medium"),
}
