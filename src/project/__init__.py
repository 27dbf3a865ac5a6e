"""The example models and data: what a fork renames and replaces. Plain Lightning, nothing of lightswitch."""
