"""Weights and optimizer states of a live DeepSpeed engine, by parameter, and the engine's portable checkpoints.

DeepSpeed's getters and setters fail for several parameter groups at stages 1 and 2 before the first step, and for a
parameter that does not divide evenly over the ranks at stage 3 (0.19). Therefore, this module finds the shards.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightswitch.checkpoints import names, optimizers
from lightswitch.checkpoints.finetuning import LEFT_OUT
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Piece, Stored
from lightswitch.errors import Refused

LOSS_SCALE = "MixedPrecision"  # Lightning's checkpoint key for the state of the GradScaler


def _imported() -> Any:
    """Return the deepspeed package, imported without its warnings about a missing GPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it warns that it found no GPU
    modules: dict[str, Any] = sys.modules
    modules.setdefault("mlflow", None)  # its autotuner, unused here, would import it for seconds
    try:
        return importlib.import_module("deepspeed")
    finally:
        if modules["mlflow"] is None:
            del modules["mlflow"]


deepspeed = _imported()


@dataclass(frozen=True)
class Part:
    """This rank's shard of a parameter."""

    flat: Tensor  # this rank's shard of a group of parameters, in the optimizer's precision: (elements,)
    begin: int  # index of the first element in `flat`
    first: int  # index of the first element in the parameter, flattened
    elements: int  # 0 if this rank holds no elements of the parameter

    def of(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.begin, self.elements)

    def of_whole(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1).narrow(0, self.first, self.elements)

    def piece(self, flat: Tensor, parameter: nn.Parameter) -> Piece:
        return Piece(self.of(flat), getattr(parameter, "ds_shape", parameter.shape), self.first)


def pieces(engine: Any, module: nn.Module) -> Iterator[tuple[str, Stored, dict[str, Stored]]]:
    """Yield each parameter's name, and this rank's shards of its weight and of its optimizer state.

    Weights are in the optimizer's precision. The state (exp_avg, …, step) is empty before the first step, and for a
    frozen parameter. Values that are not a Piece are whole on every rank that has them.
    """
    for name, parameter, part in parts(engine, module):
        if part is None:
            yield name, parameter.detach(), {}
            continue
        values = _states(engine).get(part.flat, {})
        state: dict[str, Stored] = {
            key: part.piece(value, parameter) if _is_spread(value, part) else torch.as_tensor(value)
            for key, value in values.items()
        }
        yield name, part.piece(part.flat.detach(), parameter), state


def has_working_copy(engine: Any) -> bool:
    """Return whether the engine trains, so that forward passes compute with a copy of the weights that it steps."""
    return any(hasattr(engine.optimizer, name) for name in ("update_lp_params", "checkpoint_event_prologue"))


def whole_beside_parts(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, by name, that stage 3 holds whole beside their shards, because they are small."""
    parameters = names.parameters(module).items()
    return {name: one.detach() for name, one in parameters if hasattr(one, "ds_tensor") and one.numel()}


def update_working_copy(engine: Any, module: nn.Module) -> None:
    """Update the working copy of every parameter from the optimizer's, as DeepSpeed does after a step. Collective."""
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.update_lp_params()
        return
    engine.optimizer.checkpoint_event_prologue()  # frees gathered parameters
    for _, parameter, part in parts(engine, module):
        if part is not None:
            parameter.ds_tensor.detach().narrow(0, 0, part.elements).copy_(part.of(part.flat.detach()))  # type: ignore[attr-defined]  # DeepSpeed's
    engine.optimizer.checkpoint_event_epilogue()  # gathers the parameters that every device holds whole


def rooms_for_states(engine: Any, module: nn.Module, saved: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Stored]:
    """Return the shards to read optimizer states of trained parameters into, by NAME.KEY, except for scalar states.

    Args:
        saved: tensors with the shapes of a checkpoint's states, by parameter name and state key.
    """
    rooms = dict[str, Stored]()
    for name, parameter, part in parts(engine, module):
        for key, like in saved.get(name, {}).items() if part is not None and parameter.requires_grad else ():
            if part is None or like.dim() == 0:
                continue
            rooms[f"{name}.{key}"] = part.piece(_spread(engine, key, like, part), parameter)
    return rooms


def scatter_states(engine: Any, module: nn.Module, read: Callable[[str], Mapping[str, Tensor]]) -> None:
    """Set the optimizer's states of every parameter.

    Args:
        read: returns the whole states of a parameter by its name.

    Raises:
        Refused: parameters of one group were trained for different numbers of steps.
    """
    states, first = _states(engine), dict[Tensor, tuple[str, int]]()
    for name, parameter, part in parts(engine, module):
        if part is None or not parameter.requires_grad:
            continue
        saved = read(name)
        other, step = first.setdefault(part.flat, (name, int(saved.get("step", 0))))
        _refuse_other_step(name, int(saved.get("step", 0)), other, step)
        for key, value in saved.items():
            if value.dim() == 0 and (key == "step" or _in_full_shape(parameter).dim()):  # one for a whole group
                value = value.float() if key == "step" else value.clone()
                states.setdefault(part.flat, {})[key] = value.to(_device_of_step(engine, part.flat))
                continue
            part.of(_spread(engine, key, value, part)).copy_(part.of_whole(value))


def _refuse_other_step(name: str, step: int, other: str, step_of_other: int) -> None:
    if step != step_of_other:
        raise Refused(
            f"{name} was trained in {step} steps and {other}, in the same parameter group, in {step_of_other}, but "
            "DeepSpeed counts steps per group; put them in separate groups, or use strategy=fsdp"
        )


def parts(engine: Any, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Part | None]]:
    """Yield each parameter with its name and this rank's shard.

    The shard is None if every rank holds the parameter whole, and no optimizer steps it.
    """
    zero = engine.optimizer
    groups = zip(getattr(zero, "single_partition_of_fp32_groups", ()), getattr(zero, "bit16_groups", ()), strict=True)
    flats = {id(member): flat for flat, group in groups for member in group}
    for name, parameter in names.parameters(module).items():
        yield name, parameter, _part(zero, parameter, flats.get(id(parameter)))


def _part(zero: Any, parameter: nn.Parameter, flat: Tensor | None) -> Part | None:
    """Return this rank's shard of a parameter.

    Args:
        zero: DeepSpeed's optimizer.
        flat: the flat group that holds the parameter at stages 1 and 2, if any.
    """
    rank = dist.get_rank()
    if hasattr(parameter, "ds_tensor"):
        positions, number = getattr(zero, "grad_position", {}), getattr(parameter, "ds_id", None)
        if number in positions:
            group, begin, elements = positions[number]
            flat = zero.fp32_partitioned_groups_flat[group]
        else:
            flat, begin, elements = parameter.ds_tensor.detach(), 0, parameter.ds_tensor.numel()
        first = min(elements * rank, parameter.ds_numel)  # type: ignore[attr-defined]  # DeepSpeed's
        return Part(flat, begin, first, min(elements, parameter.ds_numel - first))  # type: ignore[attr-defined]  # DeepSpeed's
    if flat is None:
        return None
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
    if mapping is None:
        return Part(flat, 0, 0, 0)
    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Part(flat, here.start, there.start, here.numel)


def _states(engine: Any) -> dict[Tensor, dict[str, Any]]:
    """Return the optimizer's state by flat group, because DeepSpeed makes it step flat groups instead of parameters."""
    states: dict[Tensor, dict[str, Any]] = getattr(getattr(engine.optimizer, "optimizer", None), "state", {})
    return states


def _spread(engine: Any, key: str, like: Tensor, part: Part) -> Tensor:
    """Return a state of the whole flat group, made if there is none; counts and masks have their own dtype."""
    values = _states(engine).setdefault(part.flat, {})
    if not _is_spread(values.get(key), part):
        dtype = part.flat.dtype if like.is_floating_point() else like.dtype
        values[key] = torch.zeros_like(part.flat, dtype=dtype, requires_grad=False)
    found: Tensor = values[key]
    return found


def _is_spread(value: object, part: Part) -> bool:
    return isinstance(value, Tensor) and value.shape == part.flat.shape


def _device_of_step(engine: Any, flat: Tensor) -> torch.device:
    """Return the device on which torch's optimizers need their step count."""
    group = engine.optimizer.optimizer.param_groups[0]
    return flat.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


class PortableDeepSpeed(PortableCheckpoints):
    """Portable checkpoints of a DeepSpeed engine: each rank writes and reads its shards of the flat groups."""

    _group_names: list[list[str]]
    _states: dict[str, dict[str, Stored]]

    def remember_groups(self, optimizer: Optimizer) -> None:
        """Store the parameter names of an optimizer's groups, before DeepSpeed flattens the groups.

        Raises:
            Refused: a resumed run would begin the state of an inner optimizer, as of Lookahead, from scratch.
        """
        if (described := optimizers.described(optimizer)) != _class(optimizer):
            raise Refused(
                f"{described} has an inner optimizer, whose state DeepSpeed does not save; use strategy=ddp or fsdp"
            )
        self._group_names = [group["params"] for group in optimizers.groups_of(optimizer, self.lightning_module)]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module, engine = self.lightning_module, self.model
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return super().lightning_module_state_dict()
        kept = list(pieces(engine, module))
        self._states = {name: state for name, _, state in kept if state}
        return {**names.state_of(module), **{name: weight for name, weight, _ in kept}}

    def local_parameters(self) -> dict[str, Stored]:
        module, engine = self.lightning_module, self.model
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return super().local_parameters()
        return {name: weight for name, weight, _ in pieces(engine, module)}

    def parameters_changed(self) -> None:
        update_working_copy(self.model, self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, which `lightning_module_state_dict`, called before by Lightning, collected."""
        states, self._states = self._states, {}
        return {"class": _class(optimizer), "state": states, "param_groups": self._groups(optimizer)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if scale := loss_scale_of(self._loss_scaler):
            checkpoint[LOSS_SCALE] = scale
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def _loss_scaler(self) -> Any:
        return getattr(getattr(self.model, "optimizer", None), "loss_scaler", None)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, engine = self.lightning_module, self.model
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            super().load_model_state_dict(checkpoint, strict)
            return
        parameters = {name: _in_full_shape(parameter) for name, parameter in names.parameters(module).items()}
        state = names.without({**names.state_of(module), **parameters}, checkpoint.get(LEFT_OUT, ()))
        self._reader.check_model(module, state, strict)
        self.read("model", {name: weight for name, weight, _ in pieces(engine, module)})
        if has_working_copy(engine):
            update_working_copy(engine, module)
        else:
            self.read("model", whole_beside_parts(module))
        self.hand_over(state.keys() - parameters.keys())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read optimizer states and the loss scale, and restore the saved options of groups."""
        module = self.lightning_module
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
        resume_loss_scale(self._loss_scaler, checkpoint.get(LOSS_SCALE, {}))
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
    """Return the class name of the user's optimizer, which DeepSpeed's may wrap."""
    is_torchs = isinstance(optimizer, Optimizer)  # then it is the user's, which may itself wrap another
    return type(optimizer if is_torchs else getattr(optimizer, "optimizer", optimizer)).__name__


def _in_full_shape(parameter: nn.Parameter) -> Tensor:
    return torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")


def loss_scale_of(scaler: Any) -> dict[str, Any]:
    """Return the `GradScaler.state_dict` whose scale grows at the same step; empty if the scale is fixed, or there is
    none.

    Args:
        scaler: a `DynamicLossScaler`, which grows in a step after ``scale_window`` good steps, or a multiple of them;
            GradScaler grows in the step that completes them.
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
    }


def resume_loss_scale(scaler: Any, state: dict[str, Any]) -> None:
    """Set a scaler to a saved scale and progress to the next growth, if both scales are dynamic.

    The run's config determines by how much and how often the scale grows. DeepSpeed resumes only from its own format.
    """
    if state and getattr(scaler, "dynamic", False):
        scaler.cur_scale = state["scale"]
        scaler.last_overflow_iter = scaler.cur_iter - 2 - state["_growth_tracker"]
