"""GPT-2 under each strategy, against a plain loop in nanoGPT's manner: as a whole, and by part of a step."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpt import flops_per_token, shape_of, tokens_for
from benchmarks.plain_gpt import Plan
from tests.engine.conftest import CHECKOUT
from tests.engine.gpu import machine
from tests.engine.gpu.cells import Cell, Found, Piece, Result, Scale, run, train_py

ON_ONE = ("single",)
STRATEGIES = ("ddp", "fsdp", "fsdp_grad_op", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3)))
TINY = ("fsdp",)
COMPILED = "compile=true"
SEQUENCES = 32  # a step and device

Measured = Mapping[str, Any]  # what benchmarks.measuring writes


@dataclass(frozen=True)
class Size:
    """
    Attributes:
        model: the choice of conf/model.
        micro_batch: sequences that a device takes at once.
        accumulation: micro batches of a step.
        warm_up_steps: before those that are measured; a compilation ends in them.
    """

    model: str
    micro_batch: int
    accumulation: int
    warm_up_steps: int
    steps: int


GPT_TINY = Size("gpt", micro_batch=2, accumulation=2, warm_up_steps=2, steps=3)


def gpt2(memory_bytes: int) -> Size:
    """Return GPT-2 with the micro batch that a card of so much memory takes: 1.3 GB a sequence at most."""
    micro_batch = 16 if memory_bytes > 60e9 else 8 if memory_bytes > 30e9 else 4
    return Size("gpt2", micro_batch, SEQUENCES // micro_batch, warm_up_steps=10, steps=20)


@dataclass(frozen=True)
class Contest:
    """A strategy on so many devices, and the plain loop on as many: beside fsdp by fully_shard, unless compiled."""

    scale: Scale
    strategy: str
    devices: int
    is_compiled: bool

    def run(self, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
        """Run the plain loop, train.py, and the plain loop again: what drifts in between is in the plain loop's
        mean."""
        end = time.monotonic() + seconds
        switches = tokens_for(self.size.model, folder)
        first = self._plain(folder, end)
        ours = self._ours(switches, folder, end)
        second = self._plain(folder, end)
        plain_step_seconds = (first["step_seconds"] + second["step_seconds"]) / 2
        found = {
            **self._figures(ours),
            "save_seconds": [round(one, 3) for one in ours["save_seconds"]],
            "ratio": round(ours["step_seconds"] / plain_step_seconds, 3),
            "plain": self._figures(first),
            "plain_step_seconds": [round(one["step_seconds"], 4) for one in (first, second)],
        }
        return Result(found, "" if math.isfinite(ours["loss"]) else "its loss is not finite")

    @property
    def size(self) -> Size:
        """Size of the model and its batch."""
        return GPT_TINY if self.scale.is_tiny else gpt2(machine.memory_bytes(0))

    @property
    def backend(self) -> str:
        """Backend of torch.compile: inductor, which takes a CPU a minute, is tried there by tests of its own."""
        return "eager" if self.scale.is_tiny else "inductor"

    def _plain(self, folder: Path, end: float) -> Measured:
        plan = plain(self.scale, self.size, folder, self.size.steps, self.backend if self.is_compiled else None)
        plan = replace(plan, is_sharded=self.strategy.startswith("fsdp") and not self.is_compiled)
        ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.devices}")
        is_started = self.devices > 1 or plan.is_sharded
        started = (sys.executable, *(ranks if is_started else ()), "-m", "benchmarks.plain_gpt")
        return _measured([*started, str(folder), json.dumps(asdict(plan))], folder, end)

    def _ours(self, switches: tuple[str, ...], folder: Path, end: float) -> Measured:
        size = self.size
        between_saves = size.warm_up_steps + size.steps
        command = train_py(
            *switches,
            *(f"strategy={self.strategy}", f"trainer.devices={self.devices}"),
            *(f"trainer.accelerator={self.scale.accelerator}", "precision=bf16-mixed"),
            *("optimizer.lr=6e-4", "optimizer.betas=[0.9,0.95]"),
            f"global_batch_size={size.micro_batch * size.accumulation * self.devices}",
            f"micro_batch_size={size.micro_batch}",
            f"trainer.max_steps={2 * between_saves + 1}",
            *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "~callbacks.best_checkpoint"),
            *(f"callbacks.last_checkpoint.every_n_steps={between_saves}", "run_id=measured", "name=gpt"),
            *("callbacks.measuring._target_=benchmarks.measuring.Measuring", f"callbacks.measuring.folder={folder}"),
            f"callbacks.measuring.warm_up_steps={size.warm_up_steps}",
            f"callbacks.measuring.steps={size.steps}",
            f"callbacks.measuring.began={time.time()}",
            *([COMPILED, f"compile.backend={self.backend}"] if self.is_compiled else []),
        )
        found = _measured(command, folder, end)
        results = json.loads((folder / "runs" / "gpt" / "measured" / "results.json").read_text())
        return {**found, "loss": results["train/loss"]}

    def _figures(self, measured: Measured) -> Found:
        shape, size = shape_of(self.size.model), self.size
        tokens = size.micro_batch * size.accumulation * self.devices * shape["context"]
        peak = machine.peak_flops(torch.cuda.get_device_name(0)) if self.scale.gpus else None
        flops_per_second = tokens * flops_per_token(shape) / measured["step_seconds"]
        return {
            "tokens_per_second": round(tokens / measured["step_seconds"]),
            "share_of_peak": None if peak is None else round(flops_per_second / (peak * self.devices), 3),
            "peak_gib": round(measured["peak_bytes"] / 2**30, 2),
            "first_step_seconds": round(measured["first_step_seconds"], 1),
        }


def eager(scale: Scale) -> Piece:
    """Return a cell for each strategy and number of devices."""
    return Piece("benchmark", _cells(scale, is_compiled=False))


def compiled(scale: Scale) -> Piece:
    """Return the same cells under torch.compile."""
    return Piece("compiled", _cells(scale, is_compiled=True))


def _cells(scale: Scale, is_compiled: bool) -> list[Cell]:
    is_there = not is_compiled or (CHECKOUT / "conf" / "compile").exists()
    lacks = "" if is_there else f"there is no switch {COMPILED}"
    counts = (1,) if scale.is_tiny else tuple(sorted({1, scale.devices}))
    return [
        Cell(f"{strategy} × {count}", Contest(scale, strategy, count, is_compiled).run, lacks, limit_seconds=480)
        for count in counts
        for strategy in (TINY if scale.is_tiny else (*(ON_ONE if count == 1 else ()), *STRATEGIES))
    ]


def plain(scale: Scale, size: Size, folder: Path, steps: int, compiled_by: str | None) -> Plan:
    """Return what a plain loop trains, from now on, on the tokens that `tokens_for` has put into the folder."""
    return Plan(
        model=shape_of(size.model),
        tokens=str(folder / "train.bin"),
        device=scale.torch_device,
        began=time.time(),
        micro_batch=size.micro_batch,
        accumulation=size.accumulation,
        warm_up_steps=size.warm_up_steps,
        steps=steps,
        compiled_by=compiled_by,
    )


def _measured(command: list[str], folder: Path, end: float) -> Measured:
    """Return what rank 0 of a run measured, with the peak of all ranks."""
    finished = run(command, folder, end - time.monotonic())
    if finished.returncode:
        raise RuntimeError(f"exit code {finished.returncode}: {finished.stderr.strip()[-1000:]}")
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("measured_*.json"))]
    return {**ranks[0], "peak_bytes": max(rank["peak_bytes"] for rank in ranks)}


OURS = {  # what is typed
    "single": ("strategy=single",),
    "single, compiled by units": ("strategy=single", "compile=true"),
    "single, compiled as a whole": ("strategy=single", "compile=true", "compile.units=[]"),
    "fsdp": ("strategy=fsdp",),
    "deepspeed_stage_2": ("strategy=deepspeed_stage_2",),
}
PLAIN: dict[str, dict[str, Any]] = {  # changes to its plan
    "a plain loop": {},
    "a plain loop, compiled": {"compiled_by": "inductor"},
    "a plain loop, fully_shard": {"is_sharded": True},
}
TINY_PARTS = ("single", "a plain loop")
PROFILED_STEPS = 5  # each has some thousand events


def by_part(scale: Scale) -> Piece:
    """Return a cell for each loop on one device; compiled ones have to fit into a call's nine minutes."""
    names = [name for name in (*OURS, *PLAIN) if not scale.is_tiny or name in TINY_PARTS]
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
        plan = replace(plain(self.scale, self.size, folder, PROFILED_STEPS, None), is_profiled=True, **PLAIN[self.name])
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1") if plan.is_sharded else ()
        return [sys.executable, *ranks, "-m", "benchmarks.plain_gpt", str(folder), json.dumps(asdict(plan))]

    def _ours(self, switches: tuple[str, ...], folder: Path) -> list[str]:
        size = self.size
        return train_py(
            *(*switches, *OURS[self.name], "trainer.devices=1", f"trainer.accelerator={self.scale.accelerator}"),
            *("precision=bf16-mixed", "optimizer.lr=6e-4", "optimizer.betas=[0.9,0.95]"),
            *(f"global_batch_size={size.micro_batch * size.accumulation}", f"micro_batch_size={size.micro_batch}"),
            *(f"trainer.max_steps={size.warm_up_steps + PROFILED_STEPS + 1}", "trainer.enable_checkpointing=false"),
            *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0"),
            *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "run_id=parts", "name=gpt"),
            *("callbacks.parts._target_=benchmarks.parts.Parts", f"callbacks.parts.folder={folder}"),
            *(f"callbacks.parts.warm_up_steps={size.warm_up_steps}", f"callbacks.parts.steps={PROFILED_STEPS}"),
        )
