"""Placeholder for src/train.py of lightning-hydra-template, which prints the command that replaces it."""

import sys

print("error: train.py is not in src, but in its parent; type python train.py", file=sys.stderr)
raise SystemExit(2)
