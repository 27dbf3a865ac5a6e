"""CPU time of a training step through train.py's Trainer, against the same step in a loop of plain PyTorch.

python -m benchmarks.step
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from hydra.utils import instantiate

from benchmarks import mlp
from benchmarks.contenders import CHECKPOINT_STEPS, LOG_STEPS, Turns, composed, raw_steps, with_engine, with_peer
from benchmarks.results import Row, options, publish, row

RAW, FUSED = "raw PyTorch", "raw PyTorch, fused AdamW"
PEER = "the peer's way"


def main() -> None:
    given = options("step", __doc__.splitlines()[0])
    torch.set_num_threads(1)  # CPU time of several threads includes those that wait
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice about workers and the like
    publish([*mlp_rows(given.quick), *gpt_rows(given.quick)], given, per="a step")


def mlp_rows(quick: bool) -> list[Row]:
    """Return the rows of the MLP; each turn contains one checkpoint."""
    turns, steps, rounds = (2, 5, 1) if quick else (6, CHECKPOINT_STEPS, 2)
    samples = 32 * (turns * steps + 100)  # all in one epoch
    overrides = [
        *("model._target_=benchmarks.mlp.MLP", "data._target_=benchmarks.mlp.PointsData", f"data.samples={samples}"),
        *("global_batch_size=32", f"trainer.log_every_n_steps={LOG_STEPS}"),
    ]
    ours, peers = Times(), Times()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            with_engine(overrides, Path(folder), ours.take(Turns(_raw_mlp(samples), turns, steps)))
        with tempfile.TemporaryDirectory() as folder:
            module, data = mlp.PeerMLP(), mlp.PointsData(samples)
            with_peer(module, data, Path(folder), peers.take(Turns(_raw_mlp(samples), turns, steps)))
    return [
        row("MLP", RAW, ours.against_raw("MLP"), "≤ 1.6"),
        row("MLP", PEER, {"MLP": ours.seconds, PEER: peers.to_scale(ours)}, "≤ 0.30"),
        row(PEER, RAW, peers.against_raw(PEER)),
    ]


def gpt_rows(quick: bool) -> list[Row]:
    """Return the rows of the GPT, in eager mode and compiled as a whole.

    Two equal plain loops in one process were measured to differ by up to three percent, so the first row is of several
    runs.
    """
    compiled = ["compile=true", "compile.units=[]", *(["compile.backend=aot_eager"] if quick else [])]
    turns = 2 if quick else 10
    return [
        _gpt_row("GPT", [], turns, rounds=1 if quick else 5, target="≤ 1.00"),
        _gpt_row("GPT, compiled as a whole", compiled, 2 * turns, rounds=1, target="≤ 0.93"),
    ]


def _gpt_row(name: str, overrides: list[str], turns: int, rounds: int, target: str) -> Row:
    steps, times = 10, Times()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            with composed(["optimizer.fused=true"], Path(folder), steps) as cfg:
                model, data = instantiate(cfg.model), instantiate(cfg.data)
            model.configure_model()
            with_engine(overrides, Path(folder), times.take(Turns(raw_steps(model, data, model.loss), turns, steps)))
    return row(name, FUSED, {name: times.seconds, FUSED: times.raw}, target)


def _raw_mlp(samples: int) -> Iterator[None]:
    model = mlp.MLP()
    return raw_steps(model, mlp.PointsData(samples), lambda batch: model.training_step(batch, 0))


class Times:
    """CPU seconds per step in the turns of a contender's runs."""

    def __init__(self) -> None:
        self.runs: list[Turns] = []

    def take(self, turns: Turns) -> Turns:
        self.runs.append(turns)
        return turns

    @property
    def seconds(self) -> list[float]:
        return [seconds for run in self.runs for seconds in run.seconds]

    @property
    def raw(self) -> list[float]:
        return [seconds for run in self.runs for seconds in run.raw_seconds]

    def against_raw(self, name: str) -> dict[str, list[float]]:
        return {name: self.seconds, RAW: self.raw}

    def to_scale(self, other: Times) -> list[float]:
        """Return the seconds, scaled as if the plain loop beside them had been as fast as beside `other`."""
        scale = other.raw
        return [mine * there / here for mine, here, there in zip(self.seconds, self.raw, scale, strict=True)]


if __name__ == "__main__":
    main()
