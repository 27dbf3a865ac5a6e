"""CPU time of a training step through train.py's Trainer, against the same step in a loop of plain PyTorch.

python -m benchmarks.step
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from hydra.utils import instantiate

from benchmarks import mlp
from benchmarks.contenders import LOG_STEPS, composed, engine_seconds, peer_seconds, raw_seconds
from benchmarks.results import Row, interleaved, options, publish, row


def main() -> None:
    given = options("step", __doc__.splitlines()[0])
    torch.set_num_threads(1)  # CPU time of several threads counts those that wait
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice about workers and the like
    publish([*mlp_rows(given.quick), *gpt_rows(given.quick)], given, per="a step")


def mlp_rows(quick: bool) -> list[Row]:
    steps, rounds = (20, 1) if quick else (1000, 7)
    samples = 32 * (steps + 100)  # within one epoch
    overrides = [
        *("model._target_=benchmarks.mlp.MLP", "data._target_=benchmarks.mlp.PointsData", f"data.samples={samples}"),
        *("global_batch_size=32", f"trainer.log_every_n_steps={LOG_STEPS}"),
    ]

    def raw() -> float:
        model = mlp.MLP()
        return raw_seconds(
            model, mlp.PointsData(samples), lambda batch: F.cross_entropy(model.net(batch[0]), batch[1]), steps
        )

    def peer(folder: Path) -> float:
        return peer_seconds(mlp.PeerMLP(), mlp.PointsData(samples), folder, steps)

    contenders = {
        "MLP": _in_folder(lambda folder: engine_seconds(overrides, folder, steps)),
        "raw PyTorch": raw,
        "the peer's way": _in_folder(peer),
    }
    seconds = interleaved(contenders, rounds)
    return [
        row("MLP", "raw PyTorch", seconds, "≤ 2.5"),
        row("MLP", "the peer's way", seconds, "≤ 0.45"),
        row("the peer's way", "raw PyTorch", seconds),
    ]


def gpt_rows(quick: bool) -> list[Row]:
    steps, rounds = (3, 1) if quick else (60, 9)

    def raw(folder: Path) -> float:
        with composed([], folder, steps) as cfg:
            model, data = instantiate(cfg.model), instantiate(cfg.data)
        return raw_seconds(model, data, model.loss, steps)

    contenders = {
        "GPT": _in_folder(lambda folder: engine_seconds([], folder, steps)),
        "raw PyTorch": _in_folder(raw),
    }
    return [row("GPT", "raw PyTorch", interleaved(contenders, rounds), "≤ 1.03")]


def _in_folder(seconds: Callable[[Path], float]) -> Callable[[], float]:
    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return seconds(Path(folder))

    return run


if __name__ == "__main__":
    main()
