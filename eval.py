"""What lightning-hydra-template calls train.py mode=test."""

raise SystemExit("error: found no eval.py, expected python train.py mode=test ckpt_path=PATH")
