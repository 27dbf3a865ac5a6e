"""Lightning's own callbacks that a run, or its strategy, can't serve, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, SpikeDetection, Timer
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor

from lightswitch import patches
from lightswitch.checkpoints.finetuning import follow_strategy, refuse_rates_by_group
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.errors import LossSpike, RefusedRequest
from lightswitch.lightning_types import callbacks_of
from lightswitch.mixins import Mixin, mixed_class
from lightswitch.strategies.averaging import average_what_is_kept, drop_averages

# By name, as an older Lightning lacks some
NOWHERE = {
    "BatchSizeFinder": "the batch is cut by global_batch_size, and what a device takes of it at once does not "
    "change the run; type micro_batch_size=auto for the largest that fits",
    "ModelPruning": "no run could be resumed, as its checkpoints do not fit the module that it prepares; prune in the "
    "module's constructor, by torch.nn.utils.prune",
    "StochasticWeightAveraging": "a resumed run could not follow it, as it replaces the schedule in mid-run; use "
    "lightning.pytorch.callbacks.EMAWeightAveraging",
}
OF_PORTABLE_CHECKPOINTS = {
    "BaseFinetuning": "the engine's own strategies alone resume with what it has unfrozen; use strategy=ddp or fsdp",
    "WeightAveraging": "the engine's own strategies alone save its averages; use strategy=ddp or fsdp",
}
OF_MEMORY = {
    "BaseFinetuning": "what DeepSpeed keeps on NVMe can't be laid out anew; use strategy=fsdp",
    "LearningRateFinder": "what DeepSpeed keeps on NVMe is not put back; find the rate with strategy=fsdp, and type it",
}
OF_COUNTED_STEPS = ("GradientAccumulationScheduler", "LearningRateFinder")
OF_AUTOMATIC_OPTIMIZATION = {
    "GradientAccumulationScheduler": "leave the callback out, and accumulate in training_step",
    "LearningRateFinder": "compare short runs, python train.py -m model.lr=1e-4,1e-3 trainer.max_steps=100",
}
OF_ONE_PROCESS = {
    "OnExceptionCheckpoint": "the other ranks take no part in a save by the one that fails; "
    "type callbacks.last_checkpoint.every_n_steps=N instead",
}
_RECENT = "recent_losses"


class KnownCallbacks(Callback):
    """Callback that refuses those which the module brings, once they are there, and has others follow the strategy."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if problems := list(refused(trainer)):
            raise RefusedRequest(problems)
        callbacks = callbacks_of(trainer)
        average_what_is_kept(callbacks)
        follow_strategy(callbacks)
        resume_spikes(callbacks)

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
    callbacks = callbacks_of(trainer)
    module: LightningModule | None = trainer.lightning_module  # None before it is attached
    return problems(callbacks, module, trainer.strategy, trainer.num_nodes * trainer.num_devices)


def problems(
    callbacks: Iterable[Callback], module: LightningModule | None, strategy: Strategy, devices: int
) -> Iterator[str]:
    """Yield the same of callbacks that no Trainer has yet."""
    by_hand = module is not None and not module.automatic_optimization
    for callback in callbacks:
        of_lightning = {base.__name__ for base in type(callback).__mro__ if base.__module__.startswith("lightning.")}
        for name in sorted(of_lightning):
            if told := _problem(name, strategy, devices):
                yield f"{type(callback).__name__}: {told}"
            elif by_hand and name in OF_AUTOMATIC_OPTIMIZATION:
                told = f"{type(module).__name__} optimizes by hand; {OF_AUTOMATIC_OPTIMIZATION[name]}"
                yield f"{type(callback).__name__}: {told}"


def _problem(name: str, strategy: Strategy, devices: int) -> str | None:
    if name in OF_PORTABLE_CHECKPOINTS and not isinstance(strategy, PortableCheckpoints):
        return OF_PORTABLE_CHECKPOINTS[name]
    if name in OF_ONE_PROCESS and devices > 1:
        return OF_ONE_PROCESS[name]
    if name in OF_COUNTED_STEPS and strategy.handles_gradient_accumulation:
        return (
            "Lightning's own DeepSpeedStrategy does not serve it; use strategy=deepspeed_stage_2, or another of these"
        )
    if name in OF_MEMORY and isinstance(strategy, DeepSpeedStrategy) and is_on_nvme(strategy):
        return OF_MEMORY[name]
    return NOWHERE.get(name)


def is_on_nvme(strategy: DeepSpeedStrategy) -> bool:
    """Return whether DeepSpeed keeps a part of the run's state on NVMe drives."""
    zero = strategy.config.get("zero_optimization", {}) if isinstance(strategy.config, dict) else {}
    return any((zero.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))


def resume_spikes(callbacks: Iterable[Callback]) -> None:
    """Have each SpikeDetection go on where it stood, with the limits that are typed."""
    for callback in callbacks:
        if isinstance(callback, SpikeDetection) and not isinstance(callback, _ResumedSpikes):
            patches.replace(callback, "__class__", mixed_class(_ResumedSpikes, type(callback)))


class _ResumedSpikes(Mixin, SpikeDetection):
    _recent_losses: tuple[float, ...] = ()  # of the window, the oldest first

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.running_mean.to(trainer.strategy.root_device)  # Lightning moves it in an epoch's first batch alone

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:  # type: ignore[override]  # of its two bases
        """Look at a batch's loss.

        Raises:
            LossSpike: on every rank, where the loss of one has jumped.
        """
        try:
            super().on_train_batch_end(trainer, *others)
        except TrainingSpikeException as error:
            raise LossSpike(
                f"the loss has a spike by step {trainer.global_step}: {self.exclude_batches_path} has its batch and "
                "the one before; lower the learning rate, or raise rtol or atol of the SpikeDetection"
            ) from error

    def _update_stats(self, val: Tensor) -> None:
        super()._update_stats(val)
        self._recent_losses = (*self._recent_losses, val.item())[-self.running_mean.window :]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _RECENT: list(self._recent_losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the losses; limits and the path to write to are this run's, and not those of a checkpoint."""
        self.last_val = state_dict["last_val"]
        self.bad_batches = list(state_dict["bad_batches"])
        self._recent_losses = tuple(state_dict.get(_RECENT, ()))
        self.running_mean.reset()
        for loss in self._recent_losses:
            self.running_mean.update(loss)
