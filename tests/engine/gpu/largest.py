"""The largest GPT that trains, strategy by strategy."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.gpt import tokens_for
from tests.engine.gpu.cells import Cell, Piece, Result, Scale
from tests.engine.gpu.command import run, train_py
from tests.engine.gpu.memory import peak_gib

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
TRAINS, TOO_LARGE, NOT_TRIED = "trains", "out of memory", "a smaller one does not train"
_STATES_BYTES = 16  # of a parameter: itself, its gradient, Adam's moments
OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "was killed", "can't allocate memory")


def piece(scale: Scale) -> Piece:
    """Return a cell for each strategy and size, smaller ones first: none is tried after one that does not train."""
    sizes = TINY_SIZES if scale.is_tiny else SIZES
    strategies = ON_ONE[:1] if scale.is_tiny else ON_ONE if scale.devices == 1 else ON_SEVERAL
    devices = 1 if scale.is_tiny else scale.devices
    cells = [
        Cell(names[number], Try(scale, strategy, size, devices, tuple(names[:number])).run, limit_seconds=480)
        for strategy in strategies
        for names in [[f"{strategy} × {devices}: {size}" for size in sizes]]
        for number, size in enumerate(sizes)
    ]
    return Piece("largest", cells)


@dataclass(frozen=True)
class Try:
    """A strategy with a GPT of a size.

    Attributes:
        smaller: names of the cells before it.
    """

    scale: Scale
    strategy: str
    size: str
    devices: int
    smaller: tuple[str, ...]

    def run(self, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
        """Train three steps, unless a smaller one did not."""
        if any(so_far[name].found.get("outcome") != TRAINS for name in self.smaller if name in so_far):
            return Result({"outcome": NOT_TRIED})
        if "offload" in self.strategy and _STATES_BYTES * float(self.size) * 1e9 > psutil.virtual_memory().total:
            return Result({"outcome": TOO_LARGE})  # the kernel might end whoever runs this, too
        finished = run(self._command(folder), folder, seconds)
        if finished.returncode == 0:
            return Result({"outcome": TRAINS, "peak_gib": peak_gib(folder / "runs" / "gpt" / "tried")})
        told = finished.stderr + finished.stdout
        if finished.returncode == -signal.SIGKILL or any(text in told for text in OUT_OF_MEMORY):
            return Result({"outcome": TOO_LARGE})
        return Result({}, f"exit code {finished.returncode}: {told.strip()[-1000:]}")

    def _command(self, folder: Path) -> list[str]:
        layers, width, heads = (TINY_SIZES if self.scale.is_tiny else SIZES)[self.size]
        return train_py(
            *tokens_for("gpt" if self.scale.is_tiny else "gpt2", folder),
            *(f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}"),
            *("model.gradient_checkpointing=true", "precision=bf16-mixed", f"strategy={self.strategy}"),
            *(f"trainer.devices={self.devices}", f"trainer.accelerator={self.scale.accelerator}"),
            *(f"global_batch_size={self.devices}", "micro_batch_size=1", "run_id=tried", "name=gpt"),
            *("trainer.max_steps=3", "trainer.log_every_n_steps=1"),
            *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "trainer.enable_checkpointing=false"),
            *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint"),
        )
