"""Memory of GPT-2: what a plan says a step takes on a device beside what torch's allocator gave it there."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpt import tokens_for
from tests.engine.gpu.cells import Cell, Piece, Result, Scale, run, train_py

SHORT = (
    *("name=gpt", "trainer.max_steps=3", "trainer.log_every_n_steps=1", "trainer.enable_checkpointing=false"),
    *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0"),
    *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint"),
)
STRATEGIES = ("fsdp", "fsdp_grad_op", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3)))
ON_ONE = ("single", *STRATEGIES, "fsdp_offload", "deepspeed_stage_3_offload")
ON_SEVERAL = ("ddp", *STRATEGIES)
AT = {  # precision, and whether activations are computed again
    "bf16-mixed": ("bf16-mixed", False),
    "bf16-true": ("bf16-true", False),
    "bf16-mixed, recomputing": ("bf16-mixed", True),
}
TOLERANCE = 0.05


def planned(scale: Scale) -> Piece:
    """Return a cell for each strategy and number of devices, and for a single device more at other precisions."""
    several = () if scale.is_tiny or scale.devices == 1 else ON_SEVERAL
    on_one = ON_ONE[:1] if scale.is_tiny else ON_ONE
    kinds = [(strategy, 1, "bf16-mixed") for strategy in on_one]
    kinds += [("single", 1, at) for at in AT if at != "bf16-mixed" and not scale.is_tiny]
    kinds += [(strategy, scale.devices, "bf16-mixed") for strategy in several]
    cells = [
        Cell(f"{strategy} × {devices} at {at}", Planned(scale, strategy, devices, at).run, limit_seconds=300)
        for strategy, devices, at in kinds
    ]
    return Piece("memory", cells)


@dataclass(frozen=True)
class Planned:
    """GPT-2 of 124 million parameters under a strategy, planned and then trained.

    Attributes:
        at: a key of AT.
    """

    scale: Scale
    strategy: str
    devices: int
    at: str

    def run(self, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
        """Plan a run, train three steps of it, and compare what tensors take: the most at once, over all ranks.

        On a CPU, where no allocator counts, nothing is compared.
        """
        switches, end = self._switches(folder), time.monotonic() + seconds
        for mode in ("plan", "fit"):
            finished = run(train_py(*switches, f"mode={mode}", f"run_id={mode}"), folder, end - time.monotonic())
            if finished.returncode:
                told = (finished.stderr + finished.stdout).strip()[-1000:]
                return Result({}, f"mode={mode}: exit code {finished.returncode}: {told}")
        rows = json.loads((folder / "runs" / "gpt" / "plan" / "plan.json").read_text())["strategies"]
        (planned_bytes,) = (row["tensor_bytes"] for row in rows if row["words"] == [f"strategy={self.strategy}"])
        planned_gib, measured_gib = planned_bytes / 2**30, _peak_gib(folder / "runs" / "gpt" / "fit")
        difference = planned_gib / measured_gib - 1 if self.scale.gpus else None
        found = {"planned_gib": planned_gib, "measured_gib": measured_gib, "difference": difference}
        if difference is None or abs(difference) <= TOLERANCE:
            return Result(found)
        return Result(found, f"{planned_gib:.2f} GiB planned, {measured_gib:.2f} measured: {difference:+.1%}")

    def _switches(self, folder: Path) -> tuple[str, ...]:
        precision, recomputes = AT[self.at]
        micro_batch = 2 if self.scale.is_tiny else 4
        return (
            *tokens_for("gpt" if self.scale.is_tiny else "gpt2", folder),
            *(f"strategy={self.strategy}", f"precision={precision}", f"model.gradient_checkpointing={recomputes}"),
            *(f"trainer.devices={self.devices}", f"trainer.accelerator={self.scale.accelerator}"),
            *(f"global_batch_size={2 * micro_batch * self.devices}", f"micro_batch_size={micro_batch}", *SHORT),
        )


def _peak_gib(run_dir: Path) -> float:
    """Return the most memory that a device of a run has held, in GiB."""
    with (run_dir / "metrics.csv").open() as file:
        return max(float(row["memory/peak_gib"]) for row in csv.DictReader(file) if row.get("memory/peak_gib"))
