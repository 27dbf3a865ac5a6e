"""Lightning's callbacks under every strategy: WeightAveraging, and the callbacks that a run does not support.

An average is elementwise, so averages of shards are shards of the average. The callback is the user's object; once the
strategy has sharded the module, the callback averages a module of this rank's local tensors instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Timer, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.checkpoints.finetuning import follow_strategy, refuse_rates_by_group
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Stored, local, with_local
from lightswitch.errors import RefusedRequest
from lightswitch.mixins import Mixin, callbacks_of, mixed_class, with_mixin

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
    "run; use lightning.pytorch.callbacks.EMAWeightAveraging",
}
OF_PORTABLE_CHECKPOINTS = {
    "BaseFinetuning": "only lightswitch's strategies can resume with the layers that it has unfrozen; use strategy=ddp "
    "or fsdp",
    "WeightAveraging": "only lightswitch's strategies save its averages; use strategy=ddp or fsdp",
}
NOT_UNDER_DEEPSPEED = {
    "BaseFinetuning": "DeepSpeed trains the parameters that require gradients when it is set up; use strategy=fsdp",
}
OF_ONE_PROCESS = {
    "OnExceptionCheckpoint": "when a rank fails, the other ranks do not take part in its save; type "
    "callbacks.last_checkpoint.every_n_steps=N instead",
}

_MARK = "averaging_state"  # Lightning's key in a checkpoint with averages
_IN_16_BITS = (torch.float16, torch.bfloat16)


class KnownCallbacks(Callback):
    """Callback that refuses unsupported callbacks, including the module's, and adapts others to the strategy."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if problems := list(refused(trainer)):
            raise RefusedRequest(problems)
        callbacks = callbacks_of(trainer)
        average_what_is_kept(callbacks)
        follow_strategy(callbacks)

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
    if name in OF_ONE_PROCESS and devices > 1:
        return OF_ONE_PROCESS[name]
    if name in NOT_UNDER_DEEPSPEED and isinstance(strategy, DeepSpeedStrategy):
        return NOT_UNDER_DEEPSPEED[name]
    return NOWHERE.get(name)


def is_on_nvme(strategy: DeepSpeedStrategy) -> bool:
    """Return whether DeepSpeed offloads optimizer state or parameters to NVMe drives."""
    zero = strategy.config.get("zero_optimization", {}) if isinstance(strategy.config, dict) else {}
    return any((zero.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))


def average_what_is_kept(callbacks: Iterable[Callback]) -> None:
    """Make each WeightAveraging average only this rank's local tensors."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and not isinstance(callback, _KeptAverages):
            patches.replace(callback, "__class__", mixed_class(_KeptAverages, type(callback)))


def drop_averages(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Read the trained weights if a run whose checkpoint has averages resumes without the callback. Collective.

    The checkpoint's model holds the averages; the optimizer's state belongs to the trained weights.
    """
    has_callback = any(isinstance(callback, WeightAveraging) for callback in callbacks_of(trainer))
    if trainer.state.fn != TrainerFn.FITTING or has_callback or _MARK not in checkpoint:
        return
    strategy = _strategy(pl_module)
    with torch.no_grad():
        strategy.read("trained", _weights(pl_module))
        strategy.parameters_changed()
    if trainer.is_global_zero:
        log.warning("the checkpoint holds averaged weights, which only WeightAveraging can resume; they are dropped")


class _KeptAverages(Mixin, WeightAveraging):
    _average_model: AveragedModel | None
    _is_swapped = False  # the module holds the averages, and this callback the trained weights
    _trained: dict[int, Tensor]  # while swapped, trained 16-bit weights; their 32-bit averages stay in the average

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:  # in a fit, the strategy has not sharded the module yet
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_swapped, self._trained = False, {}  # an earlier fit may have failed in validation
        super().setup(trainer, _Kept(pl_module), TrainerFn.FITTING)
        assert self._average_model is not None
        _widen(self._average_model.module)
        self._average_model = with_mixin(_Average, self._average_model)
        super().on_fit_start(trainer, pl_module)

    def _swap_models(self, pl_module: LightningModule) -> None:
        """Swap averages and weights, but keep the 32-bit averages of 16-bit weights, which a swap would round."""
        assert self._average_model is not None
        with _writing(pl_module) as kept:
            both = zip(_tensors(self._average_model.module), _tensors(kept), strict=True)
            for index, (average, weight) in enumerate(both):
                before = weight.data.to(average.device, copy=True)
                weight.data.copy_(self._trained.get(index, average.data))
                if average.dtype == weight.dtype:
                    average.data.copy_(before)
                elif self._is_swapped:
                    del self._trained[index]
                else:
                    self._trained[index] = before
        self._is_swapped = not self._is_swapped

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap the averages into the module, and hold the trained weights for the last checkpoint, saved later."""
        self._swap_models(pl_module)
        super().on_train_end(trainer, pl_module)

    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        if not self._is_swapped:  # otherwise the module has them already
            with _writing(pl_module) as kept:
                super()._copy_average_to_current(kept)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._average_model is None:
            return
        used, held = checkpoint["current_model_state"], dict(enumerate(_tensors(self._average_model.module)))
        averages = {index: held[index] for index in self._trained} if self._is_swapped else held
        trained = {**held, **self._trained} if self._is_swapped else {}
        for key, tensors in (("state_dict", averages), ("current_model_state", trained)):
            spread = _spread(pl_module, tensors)
            checkpoint[key] = {**used, **{name: value for name, value in spread.items() if name in used}}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read averages and trained weights; if the checkpoint has no averages, start them from its weights."""
        if self._average_model is None:  # nothing is trained: the checkpoint's model is evaluated
            return
        with _writing(pl_module) as kept:
            given = {**checkpoint, "state_dict": kept.state_dict()}
            if _MARK in checkpoint:
                strategy = _strategy(pl_module)
                strategy.read("trained", _weights(pl_module))
                strategy.read("model", _spread(pl_module, dict(enumerate(_tensors(self._average_model.module)))))
                given["state_dict"] = self._average_model.module.state_dict()
                given["current_model_state"] = kept.state_dict()
            super().on_load_checkpoint(trainer, kept, given)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._average_model, self._is_swapped, self._trained = None, False, {}  # the module may be sharded again


class _Average(Mixin, AveragedModel):
    """Average of this rank's local tensors of a module."""

    def update_parameters(self, model: nn.Module) -> None:
        assert isinstance(model, LightningModule)
        kept = _Kept(model)
        _widen(kept)
        super().update_parameters(kept)


class _Kept(LightningModule):
    """Module of this rank's local tensors of another module's parameters, and of its buffers, in the same memory."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        for index, parameter in enumerate(_strategy(module).local_parameters().values()):
            self.register_parameter(f"parameter_{index}", nn.Parameter(local(parameter), requires_grad=False))
        for index, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer_{index}", buffer)

    @property
    def device(self) -> torch.device:
        """The parameters' device, which stores the averages unless the callback names another."""
        return next((tensor.device for tensor in _tensors(self)), torch.device("cpu"))


@contextmanager
def _writing(module: LightningModule) -> Iterator[_Kept]:
    """Context that yields this rank's local tensors of a module for writing; at its end, the module computes with them.

    Lightning validates in inference mode, in which a strategy would gather tensors that can't be trained.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield _Kept(module)
        _strategy(module).parameters_changed()


def _weights(module: LightningModule) -> dict[str, Stored]:
    """Return this rank's shard of each parameter, and then each buffer, by name."""
    buffers = {names.own_name(name): buffer for name, buffer in module.named_buffers()}
    return {**_strategy(module).local_parameters(), **buffers}


def _spread(module: LightningModule, parts: Mapping[int, Tensor]) -> dict[str, Stored]:
    """Return tensors by the names of a module's weights, sharded like these.

    Args:
        parts: local tensors by the index of their weight in `_weights`.
    """
    weights = enumerate(_weights(module).items())
    return {name: with_local(weight, parts[index].detach()) for index, (name, weight) in weights if index in parts}


def _strategy(module: LightningModule) -> PortableCheckpoints:
    strategy = module.trainer.strategy
    assert isinstance(strategy, PortableCheckpoints)  # otherwise the callback was refused
    return strategy


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _widen(module: nn.Module) -> None:
    """Convert 16-bit tensors, in which the small steps of an average would be lost, to 32 bits."""
    for parameter in _tensors(module):
        if parameter.dtype in _IN_16_BITS:
            parameter.data = parameter.data.float()
