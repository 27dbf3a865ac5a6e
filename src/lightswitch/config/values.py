"""The words that a key at the top of a config may be set to, where they are few."""

ALLOWED = {
    "mode": ("fit", "validate", "test", "predict", "plan", "dry_run"),
    "on_nan": ("stop", "skip", "ignore"),
    "matmul_precision": ("highest", "high", "medium"),
}
