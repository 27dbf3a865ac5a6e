"""The clones of tests/engine/fork."""

from tests.engine.fork.conftest import clone, newer, own_clone

__all__ = ["clone", "newer", "own_clone"]
