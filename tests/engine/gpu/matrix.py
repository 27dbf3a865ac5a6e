"""Every strategy at every precision, against what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.engine.conftest import runs_in
from tests.engine.gpu.cells import Cell, Lacking, Piece, Result, Scale
from tests.engine.tables.matrix import PRECISIONS, STRATEGIES, cell

TRAINS = "trains"
TINY = {"single": ("32-true", "16-mixed"), "fsdp": ("bf16-mixed", "16-mixed")}


def expected(strategy: str, precision: str, devices: int) -> str:
    """Return what a strategy does at a precision on so many GPUs: "trains", or the line by which it is refused."""
    if strategy == "single" and devices > 1:
        return f"strategy=single uses one device, but 1 × {devices} are requested; use strategy=ddp"
    if strategy == "fsdp_tp" and precision == "16-true":
        return "strategy=fsdp_tp steps float16 weights in float16, which loses Adam's moments; use precision=bf16-true"
    if strategy == "fsdp_tp" and devices % 2:
        return (
            f"trainer.strategy.tensor_parallel_size=2 does not divide 1 × {devices} devices; use trainer.devices=2 or "
            "a multiple of it"
        )
    if strategy == "fsdp_hybrid" and devices % 2:
        return f"trainer.strategy.shard_size=2 does not divide {devices} devices; use one of 1"
    if strategy.startswith("deepspeed") and precision == "64-true":
        return "precision=64-true is not for DeepSpeed; use strategy=ddp, or another precision"
    return TRAINS


def piece(scale: Scale) -> Piece:
    """Return a cell for each strategy, precision and number of devices."""
    rows = TINY if scale.is_tiny else dict.fromkeys(STRATEGIES, PRECISIONS)
    cells = [
        _cell(scale, strategy, precision, devices)
        for devices in scale.device_counts
        for strategy, precisions in rows.items()
        for precision in precisions
    ]
    return Piece("matrix", cells, at_once=2 if scale.is_tiny else 8)


def _cell(scale: Scale, strategy: str, precision: str, devices: int) -> Cell:
    wanted = expected(strategy, precision, devices)
    if scale.accelerator == "cpu" and precision == "16-mixed" and wanted == TRAINS:
        wanted = "precision=16-mixed is for GPUs, and Lightning would put bf16-mixed in its place; use that on the CPU"

    def run(folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
        found = cell(runs_in(folder), scale.accelerator, strategy, precision, devices, int(seconds))
        if "which is not built here" in found:
            raise Lacking(found)
        return Result({"outcome": found}, "" if found == wanted else f"found {found!r}, expected {wanted!r}")

    return Cell(f"{strategy} at {precision} × {devices}", run)
