"""How often shards talk: where gradients wait for a step's last micro batch, and what is gathered ahead."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightswitch.preflight.strategies import Request, problems
from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS

SHORT = ("trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.accelerator=cpu", *NO_CHECKPOINTS)
COUNTED = (
    "callbacks.collectives._target_=tests.engine.strategies.test_communication.Collectives",
    "callbacks.collectives.folder=${hydra:runtime.output_dir}",
)
HYBRID = ("strategy=fsdp_hybrid", "trainer.strategy.shard_size=2", "micro_batch_size=3")


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not _is_about_signals(args):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _is_about_signals(args: tuple[Any, ...]) -> bool:
    """Return whether ranks tell one another of signals, as often as their speed allows: alone in double precision."""
    sent = args[0] if isinstance(args[0], list) else [args[0]]
    return any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in sent)


class Collectives(pl.Callback):
    """Writes which collectives each micro batch of rank 0 issued."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "collectives.jsonl"

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self._mode = _Counting()
        self._mode.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self._mode.__exit__(None, None, None)
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(json.dumps(self._mode.counts) + "\n")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*LANGUAGE, *SHORT, "strategy=single")


@cache
def _micro_batches(run_dir: Path) -> list[Counter[str]]:
    return [Counter(json.loads(line)) for line in (run_dir / "collectives.jsonl").read_text().splitlines()]


UNITS = 3  # two blocks, and the root with all else
LOSS = 1  # whose mean over the ranks is logged
REDUCE, SUM = "_reduce_scatter_base_", "allreduce_"


@pytest.mark.parametrize(
    ("switches", "ranks", "collective", "first", "last"),
    [
        (("strategy=fsdp",), 2, REDUCE, UNITS, UNITS),
        (("strategy=fsdp", "trainer.strategy.accumulate_gradients=unsharded"), 2, REDUCE, 0, UNITS),
        (HYBRID, 4, SUM, UNITS, UNITS + LOSS),
        ((*HYBRID, "trainer.strategy.accumulate_gradients=within_replica"), 4, SUM, 0, UNITS + LOSS),
        ((*HYBRID, "trainer.strategy.accumulate_gradients=unsharded"), 4, REDUCE, 0, UNITS),
    ],
    ids=["fsdp", "fsdp unsharded", "hybrid", "hybrid within_replica", "hybrid unsharded"],
)
def test_gradients_are_reduced_when_it_is_asked_for(
    switches: tuple[str, ...], ranks: int, collective: str, first: int, last: int, alone: Finished, train: Train
) -> None:
    run = train(*LANGUAGE, *SHORT, *COUNTED, *switches, ranks=ranks)
    counts = [counted[collective] for counted in _micro_batches(run.run_dir)]
    assert counts == 4 * [first, last]
    assert largest_difference(run, alone) <= 1e-5


def test_units_gathered_ahead_are_the_same_run(alone: Finished, train: Train) -> None:
    ahead = train(*LANGUAGE, *SHORT, *COUNTED, "strategy=fsdp", "trainer.strategy.prefetch=2", ranks=2)
    assert _micro_batches(ahead.run_dir)[0]["_allgather_base_"] >= UNITS
    assert largest_difference(ahead, alone) <= 1e-5


def _request(**strategy: object) -> Request:
    trainer = {"precision": "32-true"}
    return Request({"_target_": "FSDP", **strategy}, {}, trainer, nodes=2, devices=2, accelerator="cuda")


def test_what_means_nothing_is_refused() -> None:
    (problem,) = problems(_request(accumulate_gradients="within_replica"))
    assert problem.startswith("trainer.strategy.accumulate_gradients=within_replica is HYBRID_SHARD's")
    (problem,) = problems(_request(prefetch=0))
    assert problem == "trainer.strategy.prefetch=0: it counts units, so use 1 or more, or leave it out"
    assert not list(problems(_request(accumulate_gradients="unsharded", prefetch=1)))
