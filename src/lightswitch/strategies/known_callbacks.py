"""Lightning's callbacks that a run does not support, or that need a call more."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Timer, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from lightswitch.checkpoints.finetuning import follow_strategy, refuse_rates_by_group
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.errors import RefusedRequest
from lightswitch.mixins import callbacks_of
from lightswitch.strategies import ema
from lightswitch.strategies.ema import EMA

log = logging.getLogger(__name__)


# By class name, because older versions of Lightning lack some
NOWHERE = {
    "BatchSizeFinder": "global_batch_size sets the batch, and the micro-batch size does not change the results; type "
    "micro_batch_size=auto for the largest that fits",
    "GradientAccumulationScheduler": "each step uses global_batch_size samples in every epoch; leave it out, and type "
    "global_batch_size=N; to change N later, start a new run from this run's weights with init_from=PATH",
    "LearningRateFinder": "compare short runs with different learning rates instead; type python train.py -m "
    "optimizer.lr=1e-4,1e-3,1e-2 trainer.max_steps=100 compare=true",
    "ModelPruning": "runs could not be resumed, because its checkpoints do not match the module that it prepares; "
    "prune in the module's constructor, with torch.nn.utils.prune",
    "SpikeDetection": "runs could not be resumed, because it can't load its saved state; on_nan=stop ends a run whose "
    "loss is not finite, on_nan=skip skips such a step, and trainer.gradient_clip_val=N limits a step",
    "StochasticWeightAveraging": "a resumed run could not continue it, because it replaces the schedule during the "
    "run; type callbacks=[default,ema] callbacks.ema.decay=null for a mean of weights",
}
OF_PORTABLE_CHECKPOINTS = {
    "BaseFinetuning": "only lightswitch's strategies can resume with the layers that it has unfrozen; use strategy=ddp "
    "or fsdp",
}
NOT_OF_SHARDS = {
    "WeightAveraging": "it averages whole copies of a module; type callbacks=[default,ema] callbacks.ema.decay=N, "
    "which averages shards, or use strategy=ddp",
}
NOT_UNDER_DEEPSPEED = {
    "BaseFinetuning": "DeepSpeed trains the parameters that require gradients when it is set up; use strategy=fsdp",
}
OF_ONE_PROCESS = {
    "OnExceptionCheckpoint": "when a rank fails, the other ranks do not take part in its save; type "
    "callbacks.last_checkpoint.every_n_steps=N instead",
}


class KnownCallbacks(Callback):
    """Callback that refuses unsupported callbacks, including the module's, and adapts others to the strategy."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if problems := list(refused(trainer)):
            raise RefusedRequest(problems)
        callbacks = callbacks_of(trainer)
        follow_strategy(callbacks)
        if stage == TrainerFn.FITTING and any(isinstance(one, WeightAveraging) for one in callbacks):
            log.warning(
                "averages   Lightning's WeightAveraging ends a run with the average in place of the trained weights: "
                "with more steps, the run goes on from the average. callbacks=[default,ema] keeps both"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, BackboneFinetuning):  # no other callback may add groups
                refuse_rates_by_group(trainer, callback)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, Timer):
                callback.on_fit_start(trainer)  # Lightning called it before the checkpoint was read

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        drop_averages(trainer, pl_module, checkpoint)


def refused(trainer: Trainer) -> Iterator[str]:
    """Yield why callbacks of a Trainer are not supported under its strategy, and what to use instead."""
    return problems(callbacks_of(trainer), trainer.strategy, trainer.num_nodes * trainer.num_devices)


def problems(callbacks: Iterable[Callback], strategy: Strategy, devices: int) -> Iterator[str]:
    """Yield the same for callbacks that are not attached to a Trainer."""
    for callback in callbacks:
        of_lightning = {base.__name__ for base in type(callback).__mro__ if base.__module__.startswith("lightning.")}
        for name in sorted(of_lightning):
            if message := _problem(name, strategy, devices):
                yield f"{type(callback).__name__}: {message}"


def _problem(name: str, strategy: Strategy, devices: int) -> str | None:
    if name in OF_PORTABLE_CHECKPOINTS and not isinstance(strategy, PortableCheckpoints):
        return OF_PORTABLE_CHECKPOINTS[name]
    is_ddp = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if name in NOT_OF_SHARDS and not is_ddp and not isinstance(strategy, SingleDeviceStrategy):
        return NOT_OF_SHARDS[name]
    if name in OF_ONE_PROCESS and devices > 1:
        return OF_ONE_PROCESS[name]
    if name in NOT_UNDER_DEEPSPEED and isinstance(strategy, DeepSpeedStrategy):
        return NOT_UNDER_DEEPSPEED[name]
    return NOWHERE.get(name)


def is_on_nvme(strategy: DeepSpeedStrategy) -> bool:
    """Return whether DeepSpeed offloads optimizer state or parameters to NVMe drives."""
    zero = strategy.config.get("zero_optimization", {}) if isinstance(strategy.config, dict) else {}
    return any((zero.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))


def drop_averages(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Read the trained weights if a run whose checkpoint has averages resumes without a callback of them. Collective.

    The checkpoint's model holds the averages; the optimizer's state belongs to the trained weights.
    """
    has_callback = any(isinstance(callback, EMA | WeightAveraging) for callback in callbacks_of(trainer))
    if trainer.state.fn != TrainerFn.FITTING or has_callback or ema.STATE not in checkpoint:
        return
    ema.read_trained(pl_module)
    if trainer.is_global_zero:
        log.warning("the checkpoint holds averaged weights, which only callbacks.ema can resume; they are dropped")
