"""Lightning's own callbacks under every strategy: WeightAveraging, and those that a run can't serve.

An average is a function of each element alone, so the averages of the parts are the parts of the average. The callback
is the user's own; it is given the parts in place of the module, once the strategy has spread that.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from lightswitch.checkpoints.shards import Piece, Stored, local, with_local
from lightswitch.errors import RefusedRequest
from lightswitch.mixins import Mixin, callbacks_of, mixed_class, with_mixin

log = logging.getLogger(__name__)


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

_MARK = "averaging_state"  # Lightning's key, of a checkpoint with averages
_IN_16_BITS = (torch.float16, torch.bfloat16)


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


def average_what_is_kept(callbacks: Iterable[Callback]) -> None:
    """Have each WeightAveraging average what its rank keeps, and nothing of the others' parts."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and not isinstance(callback, _KeptAverages):
            patches.replace(callback, "__class__", mixed_class(_KeptAverages, type(callback)))


def drop_averages(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Read the weights that were trained where a run that has averaged them goes on without the callback. Collective.

    The averages, which are the checkpoint's model, are no weights of the optimizer's state.
    """
    has_callback = any(isinstance(callback, WeightAveraging) for callback in callbacks_of(trainer))
    if trainer.state.fn != TrainerFn.FITTING or has_callback or _MARK not in checkpoint:
        return
    strategy = _strategy(pl_module)
    with torch.no_grad():
        strategy.read("trained", _weights(pl_module))
        strategy.parameters_changed()
    if trainer.is_global_zero:
        log.warning(
            "the checkpoint has averages of weights, which go on with a WeightAveraging alone; they are dropped"
        )


@contextmanager
def laid_out_anew(module: LightningModule, whole: Callable[[Stored], Tensor]) -> Iterator[None]:
    """Context in which the strategy comes to keep other parts of a module on each rank; averages follow. Collective.

    Args:
        whole: returns a tensor of which each rank keeps a part. Collective.
    """
    callbacks = callbacks_of(module.trainer)
    averaging = [callback for callback in callbacks if isinstance(callback, _KeptAverages)]
    before = [callback.averages(module) for callback in averaging]
    yield
    for callback, averages in zip(averaging, before, strict=True):
        callback.lay_out(module, averages, whole)


class _KeptAverages(Mixin, WeightAveraging):
    _average_model: AveragedModel | None
    _is_swapped = False  # the module has the averages, and this callback what is trained
    _trained: dict[int, Tensor]  # meanwhile, the weights in 16 bits, whose averages in 32 stay where they are

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:  # in a fit, the strategy has spread nothing yet
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_swapped, self._trained = False, {}  # a fit before this one may have failed in validation
        super().setup(trainer, _Kept(pl_module), TrainerFn.FITTING)
        assert self._average_model is not None
        _widen(self._average_model.module)
        self._average_model = with_mixin(_Average, self._average_model)
        super().on_fit_start(trainer, pl_module)

    def _swap_models(self, pl_module: LightningModule) -> None:
        """Exchange averages and weights. An average in 32 bits of a weight in 16 stays: that would round it."""
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
        """Let the module have the averages, and keep what is trained, for the last checkpoint, which is saved later."""
        self._swap_models(pl_module)
        super().on_train_end(trainer, pl_module)

    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        if not self._is_swapped:  # or the module has them
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
        """Read averages and trained weights; without averages in the checkpoint, begin with its weights."""
        if self._average_model is None:  # nothing is trained: the model is what is evaluated
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
        self._average_model, self._is_swapped, self._trained = None, False, {}  # the module may be spread anew

    def averages(self, pl_module: LightningModule) -> dict[str, Stored]:
        """Return the average of each of the module's weights, by name, spread as they are; none before they are there.

        While the module has the averages, it is what is trained.
        """
        if self._average_model is None:
            return {}
        return _spread(pl_module, dict(enumerate(_tensors(self._average_model.module))))

    def lay_out(
        self, pl_module: LightningModule, averages: dict[str, Stored], whole: Callable[[Stored], Tensor]
    ) -> None:
        """Keep of averages what this rank now keeps of the module. Collective."""
        if self._average_model is None:
            return
        kept = copy.deepcopy(_Kept(pl_module)).to(next(_tensors(self._average_model.module)).device)
        _widen(kept)
        with torch.no_grad():
            for (name, weight), part in zip(_weights(pl_module).items(), _tensors(kept), strict=True):
                average = whole(averages[name])
                part.copy_(weight.of(average) if isinstance(weight, Piece) else average)
        self._average_model.add_module("module", kept)


class _Average(Mixin, AveragedModel):
    """Average of what a rank keeps of a module."""

    def update_parameters(self, model: nn.Module) -> None:
        assert isinstance(model, LightningModule)
        kept = _Kept(model)
        _widen(kept)
        super().update_parameters(kept)


class _Kept(LightningModule):
    """Module whose parameters and buffers are what this rank keeps of another's, in the same memory."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        for index, parameter in enumerate(_strategy(module).kept_parameters().values()):
            self.register_parameter(f"parameter_{index}", nn.Parameter(local(parameter), requires_grad=False))
        for index, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer_{index}", buffer)

    @property
    def device(self) -> torch.device:
        """The device where averages are kept unless the callback names another: that of the parameters."""
        return next((tensor.device for tensor in _tensors(self)), torch.device("cpu"))


@contextmanager
def _writing(module: LightningModule) -> Iterator[_Kept]:
    """Give what this rank keeps of a module, to be written; afterwards the module computes with that.

    Lightning validates in inference mode, in which a strategy would gather tensors that can't be trained.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield _Kept(module)
        _strategy(module).parameters_changed()


def _weights(module: LightningModule) -> dict[str, Stored]:
    """Return what this rank keeps of each parameter and then each buffer, by name."""
    buffers = {names.own_name(name): buffer for name, buffer in module.named_buffers()}
    return {**_strategy(module).kept_parameters(), **buffers}


def _spread(module: LightningModule, parts: Mapping[int, Tensor]) -> dict[str, Stored]:
    """Return tensors that stand for what this rank keeps of a module, by name, spread as that is."""
    weights = enumerate(_weights(module).items())
    return {name: with_local(weight, parts[index].detach()) for index, (name, weight) in weights if index in parts}


def _strategy(module: LightningModule) -> PortableCheckpoints:
    strategy = module.trainer.strategy
    assert isinstance(strategy, PortableCheckpoints)  # or the callback was refused
    return strategy


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _widen(module: nn.Module) -> None:
    """Take 32 bits for what has 16, in which the small steps of an average would be lost."""
    for parameter in _tensors(module):
        if parameter.dtype in _IN_16_BITS:
            parameter.data = parameter.data.float()
