"""The callbacks of a run: the engine's first, then those that the config names."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.ending import Ending, PlateauState
from lightswitch.batches.metrics import EpochMetrics
from lightswitch.checkpoints.finetuning import Freezing
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.checkpoints.portable import InitialWeights, TransientBuffers
from lightswitch.config.overrides import typed_keys
from lightswitch.context import RunContext
from lightswitch.failures.not_finite import FiniteLoss
from lightswitch.failures.preemption import Preemption
from lightswitch.failures.watchdog import Watchdog
from lightswitch.monitoring.monitored import BestCheckpoint
from lightswitch.monitoring.notices import ModelSize, PlateauValidation, StepsAreCounted, StepsByHand
from lightswitch.monitoring.progress import Progress
from lightswitch.monitoring.step_timer import StepTimer
from lightswitch.preflight import devices
from lightswitch.runs.process_logging import ProcessLogging
from lightswitch.runs.record import CleanHyperparameters, PredictionWriter, RunRecord
from lightswitch.strategies.kernels import AttentionBackends, FusedStep, GarbageBetweenSteps, MatmulPrecision
from lightswitch.strategies.known_callbacks import KnownCallbacks
from lightswitch.strategies.replicas import EqualReplicas

_VALIDATION = {"trainer.val_check_interval", "trainer.check_val_every_n_epoch"}


def of_engine(
    cfg: DictConfig,
    run: RunContext,
    record: RunRecord,
    watchdog: Watchdog,
    batch: GlobalBatch,
    compilation: Callback | None,
) -> list[Callback]:
    """Return the engine's callbacks in the order in which their hooks run.

    The log and the record of the run come first, then the watchdog, then the cut of batches (docs/architecture.md has
    the reasons).
    """
    engine: list[Callback] = [record, watchdog, Ending(), batch]
    engine += [PlateauState(), EpochMetrics(), Preemption(run.signals)]
    engine += [PredictionWriter(), ModelSize(), Freezing(), TransientBuffers()]
    engine += [ProcessLogging(run.job_logging), CleanHyperparameters(cfg), KnownCallbacks()]
    engine += [MatmulPrecision(cfg.matmul_precision), AttentionBackends(), FusedStep()]
    engine += [StepsByHand(), StepsAreCounted(), GarbageBetweenSteps()]
    if cfg.trainer.num_nodes * devices.count(cfg.trainer) > 1:
        engine.append(EqualReplicas())
    if cfg.on_nan != "ignore":
        engine.append(FiniteLoss(batch, cfg.on_nan))
    if compilation is not None:
        engine.append(compilation)
    if _VALIDATION.isdisjoint(typed_keys(run.hydra)):
        engine.append(PlateauValidation())
    if cfg.init_from:
        engine.append(InitialWeights(cfg.init_from, cfg.get("init_names")))
    return engine


def of_config(nodes: dict[str, Any] | None, trainer: DictConfig) -> list[Any]:
    """Return the callbacks that the config names, without those that the Trainer's own switches turn off.

    Lightning refuses a progress bar or a checkpoint callback beside `enable_progress_bar=false` or
    `enable_checkpointing=false`, and a second progress bar: any other takes the place of the engine's.

    Args:
        nodes: callbacks by name; None in place of one that is switched off.
    """
    users = [one for one in (nodes or {}).values() if one is not None]
    has_other_bar = any(isinstance(one, ProgressBar) and not isinstance(one, Progress) for one in users)
    left_out: list[type] = []
    if trainer.get("enable_progress_bar") is False or has_other_bar:
        left_out += [Progress]
    if trainer.get("enable_checkpointing") is False:
        left_out += [BestCheckpoint, LastCheckpoints]
    return [one for one in users if not isinstance(one, tuple(left_out))]


def trainer_arguments(users: list[Any], trainer: DictConfig) -> dict[str, Any]:
    """Return what leaves out the bar that Lightning adds where there is none: `~callbacks.progress` means no bar."""
    is_asked_for = trainer.get("enable_progress_bar") is not None
    has_bar = any(isinstance(one, ProgressBar) for one in users)
    return {} if is_asked_for or has_bar else {"enable_progress_bar": False}


def step_timer(cfg: DictConfig, run: RunContext, callbacks: list[Any]) -> list[Callback]:
    """Return a callback that measures steps, if runs are to be compared and the config names none; else nothing."""
    if not cfg.compare or any(isinstance(callback, StepTimer) for callback in callbacks):
        return []
    return [StepTimer(str(run.run_dir))]
