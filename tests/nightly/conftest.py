"""What a night is for: tests of the tests' own tools, soaks, environments of forks. `make test-nightly` runs them."""

from tests.engine.conftest import environment, fits, no_gpus, pool, port, python, start, train

__all__ = ["environment", "fits", "no_gpus", "pool", "port", "python", "start", "train"]
