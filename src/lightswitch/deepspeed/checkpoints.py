"""Portable checkpoints of a DeepSpeed engine, whose optimizer steps over flat groups of parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.batches.position import saved_position
from lightswitch.checkpoints import names, optimizers, trainable
from lightswitch.checkpoints.finetuning import unfreeze_again
from lightswitch.checkpoints.flat_shard import Stored
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.deepspeed.quiet_import import deepspeed
from lightswitch.deepspeed.state import (
    has_working_copy,
    pieces,
    rooms_for_states,
    scatter_states,
    update_working_copy,
    whole_beside_parts,
)
from lightswitch.mixins import Mixin, with_mixin

log = logging.getLogger(__name__)

States = Mapping[str, Mapping[str, Tensor]]  # of an optimizer, whole, by parameter
LOSS_SCALE = "MixedPrecision"  # Lightning's, for the state of the GradScaler


class PortableDeepSpeed(PortableCheckpoints):
    """Portable checkpoints of a DeepSpeed engine.

    Each rank writes what it keeps of the flat groups of parameters, and reads that.
    """

    _group_names: list[list[str]]
    _states: dict[str, dict[str, Stored]]
    _idle: States = MappingProxyType({})  # of parameters that were trained, and are not now

    def remember_groups(self, optimizer: Optimizer) -> None:
        """Keep the names of an optimizer's parameter groups, before DeepSpeed takes it over."""
        assert self.lightning_module is not None
        if (told := optimizers.described(optimizer)) != _class(optimizer) and self.is_global_zero:
            log.warning(
                "checkpoints under DeepSpeed leave out the state of the optimizer inside of another, %s: "
                "a resumed run begins that anew; use strategy=ddp or fsdp", told,
            )  # fmt: skip
        self._group_names = [group["params"] for group in optimizers.groups_of(optimizer, self.lightning_module)]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module, engine = self.lightning_module, self.model
        assert module is not None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return super().lightning_module_state_dict()
        kept = list(pieces(engine, module))
        self._states = {name: state for name, _, state in kept if state}
        return {**names.state_of(module), **{name: weight for name, weight, _ in kept}}

    def kept_parameters(self) -> dict[str, Stored]:
        module, engine = self.lightning_module, self.model
        assert module is not None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return super().kept_parameters()
        return {name: weight for name, weight, _ in pieces(engine, module)}

    def parameters_changed(self) -> None:
        assert self.lightning_module is not None
        update_working_copy(self.model, self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the states that were found with the weights, which Lightning asks for before."""
        states, self._states = self._states, {}
        return {"class": _class(optimizer), "state": {**self._idle, **states}, "param_groups": self._groups(optimizer)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if scale := loss_scale_of(self._loss_scaler):
            checkpoint[LOSS_SCALE] = scale
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def _loss_scaler(self) -> Any:
        return getattr(getattr(self.model, "optimizer", None), "loss_scaler", None)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, engine = self.lightning_module, self.model
        assert module is not None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            super().load_model_state_dict(checkpoint, strict)
            return
        parameters = {name: _in_full_shape(parameter) for name, parameter in names.parameters(module).items()}
        state = {**names.state_of(module), **parameters}
        self.check_model(names.without(state, checkpoint.get(trainable.KEY, ())), checkpoint, strict)
        loose = names.loose(module, state)
        self.read("model", names.without(state, {*parameters, *loose}))
        self.read("model", {name: weight for name, weight, _ in pieces(engine, module)})
        if has_working_copy(engine):
            update_working_copy(engine, module)
        else:
            self.read("model", whole_beside_parts(module))
        self.hand_over(checkpoint, loose)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read optimizer states and the loss scale, and set the groups' options to the saved ones."""
        module = self.lightning_module
        assert module is not None
        if (position := saved_position(checkpoint)) is not None:
            unfreeze_again(module.trainer, position)
        optimizers.check(self._reader.path, self.described_optimizers(), checkpoint["optimizer_states"])
        saved: dict[str, dict[str, Tensor]] = {}
        for full_name in sorted(self._reader.names("optimizer.0.")):
            name, _, key = full_name.rpartition(".")
            saved.setdefault(name, {})[key] = self._reader.like[f"optimizer.0.{full_name}"]
        rooms = rooms_for_states(self.model, module, saved)
        others = {name: {k: one for k, one in of.items() if f"{name}.{k}" not in rooms} for name, of in saved.items()}
        whole = {name: {k: torch.empty_like(one, device="cpu") for k, one in of.items()} for name, of in others.items()}
        self.read("optimizer.0", {**rooms, **{f"{name}.{k}": one for name in whole for k, one in whole[name].items()}})
        scatter_states(self.model, module, lambda name: whole.get(name, {}))
        frozen = [name for name, parameter in names.parameters(module).items() if not parameter.requires_grad]
        self._idle = {name: whole[name] for name in frozen if name in whole}
        scaler = resumed_loss_scale(self._loss_scaler, checkpoint.get(LOSS_SCALE, {}))
        if scaler is not self._loss_scaler:
            patches.replace(self.model.optimizer, "loss_scaler", scaler)  # type: ignore[union-attr]  # an engine has one
        for group, saved in zip(
            self.optimizers[0].param_groups, checkpoint["optimizer_states"][0]["param_groups"], strict=True
        ):
            group.update(optimizers.options_of(saved))

    def described_optimizers(self) -> list[tuple[str, optimizers.Groups]]:
        return [(_class(optimizer), self._groups(optimizer)) for optimizer in self.optimizers]

    def _groups(self, optimizer: Optimizer) -> optimizers.Groups:
        return [
            {**group, "params": params}
            for group, params in zip(optimizer.param_groups, self._group_names, strict=True)
        ]  # fmt: skip


def _class(optimizer: Any) -> str:
    """Return the class's name of the optimizer within DeepSpeed's."""
    is_torchs = isinstance(optimizer, Optimizer)  # as long as it is the user's, which may have one inside as well
    return type(optimizer if is_torchs else getattr(optimizer, "optimizer", optimizer)).__name__


def _in_full_shape(parameter: nn.Parameter) -> Tensor:
    return torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")


def loss_scale_of(scaler: Any) -> dict[str, Any]:
    """Return the `GradScaler.state_dict` that grows at the same step; empty where the scale is fixed, or there is none.

    Args:
        scaler: a `DynamicLossScaler`, which grows in a step with ``scale_window`` good ones, or a multiple, before it;
            GradScaler grows in the one that completes them.
    """
    if not getattr(scaler, "dynamic", False):
        return {}
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": scaler.scale_factor,
        "backoff_factor": 1 / scaler.scale_factor,
        "growth_interval": scaler.scale_window,
        "_growth_tracker": (good_steps - 1) % scaler.scale_window if good_steps else -1,
        "hysteresis": scaler.cur_hysteresis,  # overflows to take before the scale falls: GradScaler takes none
    }


def resumed_loss_scale(scaler: Any, state: dict[str, Any]) -> Any:
    """Return a scaler with a saved scale and progress to the next growth.

    By how much and how often it grows, the run's config says.
    """
    if not state or not getattr(scaler, "dynamic", False):
        return scaler
    scaler = with_mixin(_Resumed, scaler)
    scaler.load_state_dict(state)
    return scaler


class _Resumed(Mixin):
    """A `DynamicLossScaler` that goes on from a checkpoint: DeepSpeed's own does from one of DeepSpeed's alone."""

    cur_iter: int

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cur_scale = state["scale"]
        self.last_overflow_iter = self.cur_iter - 2 - state["_growth_tracker"]
        if "hysteresis" in state:
            self.cur_hysteresis = state["hysteresis"]
