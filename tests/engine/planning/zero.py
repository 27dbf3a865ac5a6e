"""Steps under DeepSpeed, each once by two real ranks: what they hold, by the ledger that plans are made with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightswitch import patches
from lightswitch.deepspeed.strategy import DeepSpeed
from lightswitch.loop.loops import replace_loops
from lightswitch.planning.simulation import Work
from lightswitch.planning.tracking import Tracking
from tests.engine.foreign import Late
from tests.engine.models.language import LanguageModel
from tests.engine.models.pictures import PatchClassifier

RANKS = 2
BUCKETS = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}  # the default's would hide all else
OFFLOADED = {"offload_optimizer": True, "offload_parameters": True}


def _language() -> LightningModule:
    return LanguageModel(partial(torch.optim.AdamW, lr=1e-3))


@dataclass(frozen=True)
class Case:
    """A model, a strategy's arguments, and a precision."""

    model: Callable[[], LightningModule]
    options: dict[str, Any]
    precision: str = "32-true"
    accumulation: int = 2
    samples: int = 6

    def work(self) -> Work:
        """Return what is simulated."""
        options = {"gradient_clip_val": 1.0, "precision": self.precision}
        return Work(self.model, self.batch, True, self.samples, self.accumulation, options)

    def strategy(self) -> DeepSpeed:
        """Return the strategy, new."""
        return DeepSpeed(**self.options, **BUCKETS)

    def batch(self, samples: int) -> list[Tensor]:
        """Return a micro batch of so many samples."""
        if self.model is _language:
            return [torch.ones(samples, 32, dtype=torch.long), torch.ones(samples, 32, dtype=torch.long)]
        return [torch.linspace(0, 1, samples * 64).view(samples, 1, 8, 8), torch.zeros(samples, dtype=torch.long)]


CASES = {
    **{f"language {stage}": Case(_language, {"stage": stage}) for stage in (1, 3)},
    "language 3, offloaded": Case(_language, {"stage": 3, **OFFLOADED}),
    "language 2, bf16-true": Case(_language, {"stage": 2}, "bf16-true"),
    "pictures 2": Case(PatchClassifier, {"stage": 2}, accumulation=1),
    "late 3": Case(Late, {"stage": 3}),
}


def held(names: Collection[str]) -> dict[str, dict[str, Any]]:
    """What this rank holds, by case."""
    return {name: _held(CASES[name]) for name in sorted(names)}


class _Endless:
    def __init__(self, batch: Callable[[], list[Tensor]]) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            yield self._batch()


def _held(case: Case) -> dict[str, Any]:
    """The least of the peaks of steps 4 and 5: in the first three, writes to weights are looked for."""
    model, tracking = case.model(), Tracking()
    patches.replace(model, "log", lambda *_, **__: None)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=case.strategy(), callbacks=[tracking], max_steps=5,
        accumulate_grad_batches=case.accumulation, limit_val_batches=0, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, check_val_every_n_epoch=None, val_check_interval=1_000, **case.work().options,
    )  # fmt: skip
    replace_loops(trainer)  # as in a run; before a validation, writes to weights would be looked for
    trainer.fit(model, _Endless(partial(case.batch, case.samples)))
    steps = tracking.steps()[3:]
    least = min((step.timeline.peak() for step in steps), key=lambda peak: peak.bytes)
    # at stage 3, ranks broadcast the order of modules until they agree: a plan has the broadcasts of buffers alone
    all_sent = (one for micro in steps[-1].collectives for one in micro)
    sent = sorted([one.name, one.bytes] for one in all_sent if one.name != "broadcast")
    return {**asdict(least), "flops": steps[0].flops, "sent": sent}
