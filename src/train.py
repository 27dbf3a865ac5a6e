"""Where lightning-hydra-template has train.py."""

import sys

print("error: train.py is not in src, but in its parent; type python train.py", file=sys.stderr)
raise SystemExit(2)
