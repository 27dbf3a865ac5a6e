"""Placeholder for eval.py of lightning-hydra-template, which prints the command that replaces it."""

import sys

print("error: eval.py is replaced by train.py; type python train.py mode=test ckpt_path=PATH", file=sys.stderr)
raise SystemExit(2)
