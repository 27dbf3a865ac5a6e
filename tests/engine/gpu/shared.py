"""Two ranks on one card, between which NCCL sends: all that a single card can show of it.

NVIDIA does not support it, and each collective takes 10 ms or more: this is about what is right, not how fast it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Lock

from tests.engine.conftest import CHECKOUT, runs_in
from tests.engine.gpu import pieces
from tests.engine.gpu.cells import Cell, Lacking, Piece, Result, Scale, run
from tests.engine.gpu.pieces import TRAINS
from tests.engine.tables.failures import CASES, local
from tests.engine.tables.matrix import cell
from tests.engine.tables.resume import END, RUN, SAVED, difference
from tests.engine.ways import TENSOR_PARALLEL, WAYS, Way

PRECISION = "bf16-mixed"
SMOKE_SECONDS = 120
ZERO = tuple(f"deepspeed_stage_{stage}" for stage in (1, 2, 3))
STRATEGIES = ("ddp", "fsdp", "fsdp_grad_op", "fsdp_hybrid", "fsdp_offload", "fsdp_tp", *ZERO)
OF_TWO = {name: way for name, way in WAYS.items() if way.ranks == 2} | {"fsdp_tp × 2": Way(TENSOR_PARALLEL, 2)}
RESUMED = (  # saved under one, gone on with under the other
    ("ddp × 2", "fsdp × 2"),
    ("fsdp × 2", "deepspeed_stage_3 × 2"),
    ("deepspeed_stage_2 × 2", "fsdp_grad_op × 2"),
    ("deepspeed_stage_3 × 2", "ddp × 2"),
)
TINY = ("matrix: fsdp", "parity: ddp × 2", "resume: ddp × 2 to fsdp × 2", "failure: an exception in rank 1")
TRAIN = (sys.executable, "-m", "tests.engine.gpu.two_ranks", sys.executable, str(CHECKOUT / "train.py"))
_lock = Lock()


def piece(scale: Scale) -> Piece:
    """Return a cell for each strategy, way, resume and failure; all are left out where NCCL refuses the two ranks."""
    kinds = {
        **{f"matrix: {strategy}": partial(_trained, scale, strategy) for strategy in STRATEGIES},
        **{f"parity: {name}": partial(_compared, scale, name) for name in OF_TWO},
        **{f"resume: {before} to {after}": partial(_resumed, scale, before, after) for before, after in RESUMED},
        **{f"failure: {case}": partial(_failed, scale, case) for case in pieces.LINES},
    }
    cells = [
        Cell(name, partial(_once_they_talk, scale, act))
        for name, act in kinds.items()
        if not scale.is_tiny or name in TINY
    ]
    return Piece("shared", cells, at_once=2 if scale.is_tiny else 4)


def _once_they_talk(
    scale: Scale, act: partial[Result], folder: Path, seconds: float, so_far: Mapping[str, Result]
) -> Result:
    began = time.monotonic()
    with _lock:  # the first cell asks
        told = refusal(scale.accelerator)
    if told:
        raise Lacking(f"two ranks can't share a card here: {told}")
    return act(folder, seconds - (time.monotonic() - began))


@cache
def refusal(accelerator: str) -> str:
    """Return why two ranks can't talk, as NCCL says it; nothing where they can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            finished = run([sys.executable, "-m", "tests.engine.gpu.two_ranks"], Path(folder), SMOKE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"an all-reduce has not ended in {SMOKE_SECONDS} s"
    lines = [line for line in finished.stderr.splitlines() if "rror" in line or "uplicate GPU" in line]
    return "" if finished.returncode == 0 else (lines[-1].strip() if lines else f"exit code {finished.returncode}")


def _trained(scale: Scale, strategy: str, folder: Path, seconds: float) -> Result:
    found = cell(runs_in(folder, each_a_node=True), scale.accelerator, strategy, PRECISION, 2, int(seconds))
    return Result({"outcome": found}, "" if found == TRAINS else f"found {found!r}, expected {TRAINS!r}")


def _compared(scale: Scale, name: str, folder: Path, seconds: float) -> Result:
    return pieces.compared(scale, _under(scale, folder, seconds), name)


def _resumed(scale: Scale, before: str, after: str, folder: Path, seconds: float) -> Result:
    under, to_the_end = _under(scale, folder, seconds), (*RUN, f"trainer.max_steps={END}")
    uninterrupted = under(pieces.ALONE, *to_the_end)
    begun = under(before, *RUN, f"trainer.max_steps={SAVED}", saved=folder / "begun")
    return pieces.judged_difference(scale, difference(uninterrupted, under(after, *to_the_end, saved=begun.folder)))


def _under(scale: Scale, folder: Path, seconds: float) -> pieces.Under:
    ways = {pieces.ALONE: WAYS[pieces.ALONE], **OF_TWO}
    return pieces.under_ways(scale, folder, seconds, ways, each_a_node=True)


def _failed(scale: Scale, name: str, folder: Path, seconds: float) -> Result:
    case = replace(CASES[name], arguments=(*CASES[name].arguments, f"trainer.accelerator={scale.accelerator}"))
    seen = local(case, (*TRAIN, "strategy=ddp"), folder / "run", seconds)
    return pieces.judged(name, "python", seen)
