"""The cluster of tests/engine/slurm, for what takes it longer."""

from tests.engine.slurm.conftest import checkout, slurm, slurm_cluster

__all__ = ["checkout", "slurm", "slurm_cluster"]
