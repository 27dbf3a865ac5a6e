"""Placeholder for eval.py of lightning-hydra-template, which prints the command that replaces it."""

import sys

print("error: found no eval.py, expected python train.py mode=test ckpt_path=PATH", file=sys.stderr)
raise SystemExit(2)
