"""Runs of train.py for the tests beside this file."""

from tests.runs import environment, no_gpus, train

__all__ = ["environment", "no_gpus", "train"]
