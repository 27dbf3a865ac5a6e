"""What a night is for: tests of the tests' own tools, soaks, environments of forks. `make test-nightly` runs them."""

from tests.engine.conftest import environment, no_gpus, port, python, start, train

__all__ = ["environment", "no_gpus", "port", "python", "start", "train"]
