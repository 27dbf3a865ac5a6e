"""The clones of tests/engine/fork."""

from tests.engine.fork.conftest import clone, own_clone

__all__ = ["clone", "own_clone"]
