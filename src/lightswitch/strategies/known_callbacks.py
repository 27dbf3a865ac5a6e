"""Lightning's own callbacks that a run, or its strategy, can't serve, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Timer
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy

from lightswitch.checkpoints.finetuning import follow_strategy, refuse_rates_by_group
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.errors import RefusedRequest
from lightswitch.lightning_types import callbacks_of
from lightswitch.strategies.averaging import average_what_is_kept, drop_averages

# By name, as an older Lightning lacks some
NOWHERE = {
    "BatchSizeFinder": "the batch is cut by global_batch_size, and what a device takes of it at once does not "
    "change the run; type micro_batch_size=auto for the largest that fits",
    "GradientAccumulationScheduler": "a step takes global_batch_size samples in every epoch; leave it out, and type "
    "global_batch_size=N, or another N in a run that starts from the weights of this one, with init_from=PATH",
    "LearningRateFinder": "a rate is found by runs that are short, and put beside one another; type "
    "python train.py -m optimizer.lr=1e-4,1e-3,1e-2 trainer.max_steps=100 compare=true",
    "ModelPruning": "no run could be resumed, as its checkpoints do not fit the module that it prepares; prune in the "
    "module's constructor, by torch.nn.utils.prune",
    "SpikeDetection": "no run could be resumed, as it can't read what it saves; on_nan=stop ends a run whose loss is "
    "not finite, on_nan=skip leaves such a step out, and trainer.gradient_clip_val=N bounds a step",
    "StochasticWeightAveraging": "a resumed run could not follow it, as it replaces the schedule in mid-run; use "
    "lightning.pytorch.callbacks.EMAWeightAveraging",
}
OF_PORTABLE_CHECKPOINTS = {
    "BaseFinetuning": "the engine's own strategies alone resume with what it has unfrozen; use strategy=ddp or fsdp",
    "WeightAveraging": "the engine's own strategies alone save its averages; use strategy=ddp or fsdp",
}
OF_MEMORY = {
    "BaseFinetuning": "what DeepSpeed keeps on NVMe can't be laid out anew; use strategy=fsdp",
}
OF_ONE_PROCESS = {
    "OnExceptionCheckpoint": "the other ranks take no part in a save by the one that fails; "
    "type callbacks.last_checkpoint.every_n_steps=N instead",
}


class KnownCallbacks(Callback):
    """Callback that refuses those which the module brings, once they are there, and has others follow the strategy."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if problems := list(refused(trainer)):
            raise RefusedRequest(problems)
        callbacks = callbacks_of(trainer)
        average_what_is_kept(callbacks)
        follow_strategy(callbacks)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, BackboneFinetuning):  # others may add no groups
                refuse_rates_by_group(trainer, callback)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, Timer):
                callback.on_fit_start(trainer)  # where Lightning called it, the checkpoint was not yet read

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        drop_averages(trainer, pl_module, checkpoint)


def refused(trainer: Trainer) -> Iterator[str]:
    """Yield what is wrong with the callbacks of a Trainer under its strategy, and what to use instead."""
    return problems(callbacks_of(trainer), trainer.strategy, trainer.num_nodes * trainer.num_devices)


def problems(callbacks: Iterable[Callback], strategy: Strategy, devices: int) -> Iterator[str]:
    """Yield the same of callbacks that no Trainer has yet."""
    for callback in callbacks:
        of_lightning = {base.__name__ for base in type(callback).__mro__ if base.__module__.startswith("lightning.")}
        for name in sorted(of_lightning):
            if told := _problem(name, strategy, devices):
                yield f"{type(callback).__name__}: {told}"


def _problem(name: str, strategy: Strategy, devices: int) -> str | None:
    if name in OF_PORTABLE_CHECKPOINTS and not isinstance(strategy, PortableCheckpoints):
        return OF_PORTABLE_CHECKPOINTS[name]
    if name in OF_ONE_PROCESS and devices > 1:
        return OF_ONE_PROCESS[name]
    if name in OF_MEMORY and isinstance(strategy, DeepSpeedStrategy) and is_on_nvme(strategy):
        return OF_MEMORY[name]
    return NOWHERE.get(name)


def is_on_nvme(strategy: DeepSpeedStrategy) -> bool:
    """Return whether DeepSpeed keeps a part of the run's state on NVMe drives."""
    zero = strategy.config.get("zero_optimization", {}) if isinstance(strategy.config, dict) else {}
    return any((zero.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))
