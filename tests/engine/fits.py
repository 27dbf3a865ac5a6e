"""Trainings on the ranks of the pool: a strategy of conf with the engine's callbacks, without a run around it."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import OmegaConf
from torch import Tensor

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints.last import StepBoundary
from lightswitch.hooked_strategy import hooked
from lightswitch.loop.hooks import skip_empty_hooks
from lightswitch.loop.loops import replace_loops
from lightswitch.monitoring.throughput import GradNorm
from lightswitch.strategies.agreement import Agreement
from lightswitch.strategies.callbacks import StrategyCallback
from lightswitch.strategies.ddp import Single
from lightswitch.strategies.units import Compilation
from tests.engine.data.text import Text
from tests.engine.models.language import LanguageModel
from tests.engine.models.pictures import PatchClassifier, Pictures
from tests.engine.plain import PlainData, PlainModel
from tests.engine.strategies.witness import Witness
from tests.pool import Pool
from tests.runs import CHECKOUT


@dataclass(frozen=True)
class Fit:
    """What is trained, and how; `trained` does so in a rank.

    Attributes:
        strategy: a file of conf/strategy, with options: "fsdp cpu_offload=true"; or what makes one.
        arguments: others of the Trainer: "precision=bf16-mixed gradient_clip_val=0.1".
        agrees: ranks compare their replicas.
    """

    module: Callable[[], pl.LightningModule]
    data: Callable[[], pl.LightningDataModule]
    strategy: str | Callable[[], Strategy] = "single"
    global_batch: int = 24
    micro_batch: int | None = 6
    steps: int = 4
    arguments: str = ""
    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    agrees: bool = False
    compilation: Callable[[], Compilation] | None = None

    def trainer(self, *callbacks: pl.Callback, logger: Logger | list[Logger] | None = None) -> pl.Trainer:
        """Return a Trainer with these callbacks after the engine's."""
        make = of_conf(self.strategy) if isinstance(self.strategy, str) else self.strategy
        ranks = int(os.environ["WORLD_SIZE"])
        replicas = ranks // getattr(strategy := make(), "_tensor_parallel_size", 1)
        plan = BatchPlan.derive(self.global_batch, self.micro_batch, replicas)
        own = StrategyCallback(compilation=self.compilation and self.compilation())
        engine = [GlobalBatch(plan, seed=42), own, *([Agreement()] if self.agrees else [])]
        engine += [] if any(isinstance(one, StepBoundary) for one in callbacks) else [StepBoundary()]
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=hooked(strategy),
            max_steps=self.steps,
            check_val_every_n_epoch=None,
            val_check_interval=self.steps * plan.accumulation,
            accumulate_grad_batches=plan.accumulation,
            callbacks=[*engine, *callbacks, *(make() for make in self.callbacks)],
            logger=logger or False,
            **{"log_every_n_steps": 1, "gradient_clip_val": 1.0} | _typed(self.arguments),
            **{"use_distributed_sampler": False, "enable_progress_bar": False, "enable_model_summary": False},
            enable_checkpointing=any(isinstance(one, pl.callbacks.Checkpoint) for one in callbacks),
        )
        skip_empty_hooks()
        replace_loops(trainer)
        return trainer


@dataclass
class Outcome:
    """What came of a fit in a rank.

    Attributes:
        columns: metrics by step.
        told: what the engine has logged.
        start, end: whole tensors by name.
        held: elements that this rank holds, as Witness counts them.
    """

    columns: dict[str, dict[int, float]]
    told: str
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    held: dict[str, Any]

    def column(self, name: str) -> dict[int, float]:
        assert self.columns.get(name), f"there is no {name}"
        return self.columns[name]


ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
LANGUAGE = Fit(partial(LanguageModel, ADAMW), Text)
CLASSIFIER = Fit(PatchClassifier, partial(Pictures, 1210))
PLAIN = Fit(PlainModel, PlainData)
TENSOR_PARALLEL = "fsdp_tp plans.LanguageModel=tests.engine.models.language.tensor_parallel"

Fits = Callable[..., list[Outcome]]


def local_trainer(folder: Path, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    """Return a Trainer of this process alone, with these callbacks and nothing that writes but they."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        **{"accelerator": "cpu", "strategy": hooked(Single()), "callbacks": [*callbacks], "default_root_dir": folder},
        **{"use_distributed_sampler": False, **quiet, **arguments},
        enable_checkpointing=any(isinstance(one, pl.callbacks.Checkpoint) for one in callbacks),
    )


@pytest.fixture(scope="session")
def fits(pool: Pool) -> Fits:
    """`fits(fit, ranks)`: what came of it in each rank, trained once."""
    return cache(lambda fit, ranks=1: pool(ranks)(trained, fit))


def trained(fit: Fit) -> Outcome:
    """Fit, which ends with a validation, and test in this rank."""
    pl.seed_everything(42, workers=True, verbose=False)
    module, data = fit.module(), fit.data()
    witness, curve, lines = Witness(), Curve(), Lines()
    logging.getLogger("lightswitch").addHandler(lines)
    logging.getLogger("lightswitch").setLevel(logging.INFO)
    trainer = fit.trainer(GradNorm(), witness, logger=curve)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    return Outcome(dict(curve.columns), "\n".join(lines.told), witness.start, witness.end, witness.held)


def of_conf(words: str) -> Callable[[], Strategy]:
    """Return what makes a strategy of conf, with options."""
    name, *options = words.split()
    node = OmegaConf.load(CHECKOUT / f"conf/strategy/{name}.yaml").strategy
    arguments = OmegaConf.to_container(OmegaConf.merge(node, OmegaConf.from_dotlist(options)))
    return partial(resolve_name(arguments.pop("_target_")), **arguments)


def _typed(words: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.from_dotlist(words.split()))


class Curve(Logger):
    """Metrics by name and step."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[int, float]] = defaultdict(dict)

    name, version = "curve", 0

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.columns[name][step or 0] = value


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
