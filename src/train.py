"""Where lightning-hydra-template has train.py."""

raise SystemExit("error: train.py is not in src, but in its parent; type python train.py")
