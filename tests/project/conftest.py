"""Runs of train.py for the tests beside this file."""

from tests.runs import environment, train

__all__ = ["environment", "train"]
