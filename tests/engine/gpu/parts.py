"""What a step costs, by part: ours and a plain loop's, so that one table tells what to mend next."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpt import tokens_for
from tests.engine.gpu import machine
from tests.engine.gpu.benchmark import GPT_TINY, Size, gpt2, plain
from tests.engine.gpu.cells import Cell, Piece, Result, Scale, run, train_py

OURS = {  # what is typed
    "single": ("strategy=single",),
    "single, compiled by units": ("strategy=single", "compile=true"),
    "single, compiled as a whole": ("strategy=single", "compile=true", "compile.scope=whole"),
    "fsdp": ("strategy=fsdp",),
    "deepspeed_stage_2": ("strategy=deepspeed_stage_2",),
}
PLAIN: dict[str, dict[str, Any]] = {  # changes to its plan
    "a plain loop": {},
    "a plain loop, compiled": {"compiled_by": "inductor"},
    "a plain loop, fully_shard": {"is_sharded": True},
}
TINY = ("single", "a plain loop")
STEPS = 5  # each has some thousand events


def piece(scale: Scale) -> Piece:
    """Return a cell for each loop on one device; compiled ones have to fit into a call's nine minutes."""
    names = [name for name in (*OURS, *PLAIN) if not scale.is_tiny or name in TINY]
    return Piece("parts", [Cell(name, Loop(scale, name).run, limit_seconds=300) for name in names])


@dataclass(frozen=True)
class Loop:
    """GPT-2 of 124 million parameters at bf16-mixed in a loop: a key of OURS or of PLAIN."""

    scale: Scale
    name: str

    def run(self, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
        """Train, profile some steps, and return milliseconds by part."""
        switches = tokens_for(self.size.model, folder)
        command = self._plain(folder) if self.name in PLAIN else self._ours(switches, folder)
        finished = run(command, folder, seconds)
        if finished.returncode:
            return Result({}, f"exit code {finished.returncode}: {finished.stderr.strip()[-1000:]}")
        return Result(json.loads((folder / "parts_0.json").read_text()))

    @property
    def size(self) -> Size:
        """Size of the model and its batch."""
        return GPT_TINY if self.scale.is_tiny else gpt2(machine.memory_bytes(0))

    def _plain(self, folder: Path) -> list[str]:
        plan = replace(plain(self.scale, self.size, folder, STEPS, None), is_profiled=True, **PLAIN[self.name])
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1") if plan.is_sharded else ()
        return [sys.executable, *ranks, "-m", "benchmarks.plain_gpt", str(folder), json.dumps(asdict(plan))]

    def _ours(self, switches: tuple[str, ...], folder: Path) -> list[str]:
        size = self.size
        return train_py(
            *(*switches, *OURS[self.name], "trainer.devices=1", f"trainer.accelerator={self.scale.accelerator}"),
            *("precision=bf16-mixed", "optimizer.lr=6e-4", "optimizer.betas=[0.9,0.95]"),
            *(f"global_batch_size={size.micro_batch * size.accumulation}", f"micro_batch_size={size.micro_batch}"),
            *(f"trainer.max_steps={size.warm_up_steps + STEPS + 1}", "trainer.enable_checkpointing=false"),
            *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0"),
            *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "run_id=parts", "name=gpt"),
            *("callbacks.parts._target_=benchmarks.parts.Parts", f"callbacks.parts.folder={folder}"),
            *(f"callbacks.parts.warm_up_steps={size.warm_up_steps}", f"callbacks.parts.steps={STEPS}"),
        )
