"""The largest GPT that trains, strategy by strategy."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.engine.conftest import CHECKOUT
from tests.engine.gpu.benchmark import data_of, run, shape_of, write_tokens
from tests.engine.gpu.cells import Cell, Piece, Result, Scale

# By parameters in 10^9: layers, width and heads of GPT-2, and from 2.7 on of GPT-3 (Brown et al. 2020, table 2.1)
SIZES = {
    "0.12": (12, 768, 12),
    "0.35": (24, 1024, 16),
    "0.77": (36, 1280, 20),
    "1.6": (48, 1600, 25),
    "2.7": (32, 2560, 32),
    "6.7": (32, 4096, 32),
    "13": (40, 5120, 40),
    "30": (48, 7168, 56),
}
TINY_SIZES = {"0.0001": (1, 32, 2), "0.0002": (2, 32, 2)}
ON_ONE = ("single", "fsdp_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
ON_SEVERAL = ("ddp", "fsdp", "fsdp_offload", "deepspeed_stage_3", "deepspeed_stage_3_offload")
TRAINS, TOO_LARGE = "trains", "out of memory"
OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "was killed", "can't allocate memory")


def piece(scale: Scale) -> Piece:
    """Return a cell for each strategy and size, smaller ones first: what follows one that is too large is not tried."""
    sizes = TINY_SIZES if scale.is_tiny else SIZES
    strategies = ON_ONE[:1] if scale.is_tiny else ON_ONE if scale.devices == 1 else ON_SEVERAL
    devices = 1 if scale.is_tiny else scale.devices
    cells = [
        Cell(_name(strategy, size, devices), partial(_tried, scale, strategy, list(sizes), size, devices))
        for strategy in strategies
        for size in sizes
    ]
    return Piece("largest", cells)


def _name(strategy: str, size: str, devices: int) -> str:
    return f"{strategy} × {devices}: {size}"


def _tried(
    scale: Scale,
    strategy: str,
    sizes: list[str],
    size: str,
    devices: int,
    folder: Path,
    seconds: float,
    so_far: Mapping[str, Result],
) -> Result:
    smaller = [so_far.get(_name(strategy, one, devices)) for one in sizes[: sizes.index(size)]]
    if any(result is not None and result.found.get("outcome") == TOO_LARGE for result in smaller):
        return Result({"outcome": TOO_LARGE})
    layers, width, heads = (TINY_SIZES if scale.is_tiny else SIZES)[size]
    model = "gpt" if scale.is_tiny else "gpt2"
    write_tokens(folder, shape_of(model)["vocab_size"])
    command = [
        *(sys.executable, str(CHECKOUT / "train.py"), f"model={model}", *data_of(folder)),
        *(f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}"),
        *("model.gradient_checkpointing=true", "precision=bf16-mixed"),
        *(f"strategy={strategy}", f"trainer.devices={devices}", f"trainer.accelerator={scale.accelerator}"),
        *(f"global_batch_size={devices}", "micro_batch_size=1", "trainer.max_steps=3", "trainer.log_every_n_steps=1"),
        *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "run_id=tried", "name=gpt"),
        *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "trainer.enable_checkpointing=false"),
    ]
    finished = run(command, folder, seconds)
    if finished.returncode == 0:
        return Result({"outcome": TRAINS, "peak_gib": _peak_gib(folder / "runs" / "gpt" / "tried")})
    told = finished.stderr + finished.stdout
    if finished.returncode == -9 or any(text in told for text in OUT_OF_MEMORY):
        return Result({"outcome": TOO_LARGE})
    return Result({}, f"exit code {finished.returncode}: {told.strip()[-1000:]}")


def _peak_gib(run_dir: Path) -> float:
    with (run_dir / "metrics.csv").open() as file:
        return max(float(row["memory/peak_gib"]) for row in csv.DictReader(file) if row.get("memory/peak_gib"))
