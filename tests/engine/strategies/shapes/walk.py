"""A shape of module under a strategy, in a rank of the pool.

It is trained for a few steps and saved; a checkpoint of one process is resumed from and trained to the end; the last
checkpoint is read back and tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints.freezing import Freezing
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.hooked_strategy import hooked
from lightswitch.launch.loop import replace_loops
from lightswitch.strategies.callbacks import KnownCallbacks
from tests.engine.strategies.shapes import modules

SAVED, END = 2, 4  # steps

Cell = dict[str, Any]


def strategies() -> dict[str, Callable[[], Any]]:
    from lightswitch.deepspeed.strategy import DeepSpeed
    from lightswitch.strategies.ddp import DDP
    from lightswitch.strategies.fsdp import FSDP
    from lightswitch.strategies.fsdp1 import FSDP1
    from lightswitch.strategies.single import Single
    from lightswitch.strategies.tensor_parallel import TensorParallel

    return {
        "single": Single,
        "ddp": DDP,
        "ddp find_unused": partial(DDP, find_unused_parameters=True),
        "fsdp": FSDP,
        "fsdp_grad_op": partial(FSDP, sharding_strategy="SHARD_GRAD_OP"),
        "fsdp in bfloat16": partial(FSDP, param_dtype="bfloat16", reduce_dtype="float32"),
        "fsdp_tp": partial(TensorParallel, 2, {"Unfreezing": f"{modules.__name__}.cut"}),
        "fsdp1": FSDP1,
        **{f"deepspeed_stage_{stage}": partial(DeepSpeed, stage=stage) for stage in (1, 2, 3)},
    }


def ranks(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def trained(strategy: str, shape: str, checkpoint: Path | None, folder: Path) -> Cell:
    """What came of a shape in this rank.

    Args:
        checkpoint: to resume from; None to train without a break.
    """
    begun, resumed = _Curve(), _Curve()
    module = _module(shape, seed=1)
    data = modules.Sentences(getattr(module, "samples", 64))
    _trainer(strategy, folder, SAVED if checkpoint else END, begun).fit(module, data)
    module = _module(shape, seed=2)
    trainer = _trainer(strategy, folder, END, resumed)
    if checkpoint:
        trainer.fit(module, data, ckpt_path=checkpoint)
    trainer.test(module, data, ckpt_path=folder / f"checkpoints/step_{END}.ckpt", verbose=False)
    extra = module.get_extra_state() if shape == "Versioned" else None
    return {"losses": begun.losses + resumed.losses, "test": resumed.test, "extra": extra}


def _module(shape: str, seed: int) -> pl.LightningModule:
    pl.seed_everything(seed, workers=True, verbose=False)
    return getattr(modules, shape)()


def _trainer(strategy: str, folder: Path, steps: int, curve: Logger) -> pl.Trainer:
    replicas = 1 if strategy == "fsdp_tp" else ranks(strategy)
    plan = BatchPlan.derive(global_batch=8, micro_batch=2, replicas=replicas)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks(strategy),
        strategy=hooked(strategies()[strategy]()),
        max_steps=steps,
        accumulate_grad_batches=plan.accumulation,
        gradient_clip_val=0.5,
        callbacks=[
            *(KnownCallbacks(), GlobalBatch(plan, seed=3), Freezing()),
            LastCheckpoints(str(folder / "checkpoints"), every_n_steps=SAVED),
        ],
        logger=curve,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    replace_loops(trainer)
    return trainer


class _Curve(Logger):
    """The loss of each step, and that of the test."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.test: float | None = None

    @property
    def name(self) -> str:
        return "curve"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        return

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "train/loss" in metrics:
            self.losses.append(metrics["train/loss"])
        self.test = metrics.get("test/loss", self.test)
