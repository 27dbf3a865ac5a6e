"""Limits of torch's process groups."""

from __future__ import annotations

from collections.abc import Iterator

from lightswitch.preflight.strategies.request import Request


def problems(request: Request) -> Iterator[str]:
    """Yield why torch can't form the process group that is asked for."""
    backend = request.strategy.get("process_group_backend")
    if backend == "nccl" and not request.on_gpu:
        yield "trainer.strategy.process_group_backend=nccl is for GPUs, and the run is on the CPU; use gloo"
    if backend == "mpi":
        from torch.distributed import is_mpi_available

        if not is_mpi_available():
            yield "trainer.strategy.process_group_backend=mpi: this torch was built without MPI; use gloo or nccl"
