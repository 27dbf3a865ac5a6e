"""How often shards talk, and how long a rank waits for another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import TorchDispatchMode

from lightswitch.deepspeed.strategy import DeepSpeed
from tests.engine.fits import LANGUAGE, PLAIN, TENSOR_PARALLEL, Fits
from tests.night import at_night
from tests.runs import largest_difference


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
    """Logs how many collectives of each kind each micro batch issued."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self._mode = _Counting()
        self._mode.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self._mode.__exit__(None, None, None)
        trainer.logger.log_metrics({name: self._mode.counts[name] for name in (REDUCE, SUM)}, step=index)


LONGER = replace(LANGUAGE, steps=5)  # the last one, after which it is saved, is looked at
COUNTED = replace(LONGER, callbacks=(Collectives,))
UNITS = 3  # two blocks, and the root with all else
LOOKED_AT = 4  # micro batches: ranks compare what the first three write to weights
LOSS = 1  # whose mean over the ranks is logged
USE = 1  # of parameters, which ranks compare after a backward pass that reduces
REDUCE, SUM = "_reduce_scatter_base_", "allreduce_"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "ranks", "collective", "first", "last"),
    [
        ("fsdp", 2, REDUCE, UNITS, UNITS),
        ("fsdp_hybrid shard_size=2", 4, SUM, UNITS + USE, UNITS + USE + LOSS),
    ],
)
def test_gradients_are_reduced_in_each_micro_batch(
    strategy: str, ranks: int, collective: str, first: int, last: int, fits: Fits
) -> None:
    (alone,), run = fits(LONGER), fits(replace(COUNTED, strategy=strategy, micro_batch=12 // ranks), ranks)[0]
    assert [*run.column(collective).values()][LOOKED_AT:-2] == 2 * [first, last]
    assert largest_difference(run, alone) <= 1e-5


# Every process group of a run has the time-out of its strategy: the watchdog is to speak before torch does


class Timed(pl.Callback):
    """Stores the time-outs of the process groups in a metric that no other callback has: seconds, by group."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
        found = [backend.options._timeout for backend in backends]
        trainer.logger.log_metrics({f"timeout_{n}": one.total_seconds() for n, one in enumerate(found)})


FITS = {  # and at least how many groups it has
    "ddp": (replace(PLAIN, strategy="ddp timeout_seconds=900"), 1),
    "fsdp_tp": (replace(LANGUAGE, strategy=f"{TENSOR_PARALLEL} timeout_seconds=900"), 2),
    "fsdp_hybrid": (replace(PLAIN, strategy="fsdp_hybrid shard_size=1 timeout_seconds=900"), 2),
    "DeepSpeed": (replace(PLAIN, strategy=partial(DeepSpeed, stage=2, timeout=timedelta(seconds=900))), 2),
}


@pytest.mark.parametrize("strategy", ["fsdp_hybrid", *at_night("ddp", "fsdp_tp", "DeepSpeed")])
def test_a_strategys_groups_have_its_time_out(strategy: str, fits: Fits) -> None:
    fit, groups = FITS[strategy]
    run = fits(replace(fit, steps=1, callbacks=(Timed,)), 2)[0]
    found = [values[0] for name, values in run.columns.items() if name.startswith("timeout_")]
    assert len(found) >= groups
    assert set(found) == {900}
