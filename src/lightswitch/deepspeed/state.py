"""Weights and optimizer states of a live DeepSpeed engine, parameter by parameter.

DeepSpeed's own getters and setters fail for several parameter groups at stages 1 and 2 before the first step, and where
a parameter does not divide over the ranks at stage 3 (0.19); so the parts are found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.checkpoints.flat_shard import Piece, Stored
from lightswitch.errors import Refused


@dataclass(frozen=True)
class Part:
    """Part of a parameter that this rank keeps."""

    flat: Tensor  # this rank's part of a group of parameters, in the optimizer's precision: (elements,)
    begin: int  # in `flat`
    first: int  # in the parameter
    elements: int  # 0 on a rank that keeps nothing of it

    def of(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.begin, self.elements)

    def of_whole(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1).narrow(0, self.first, self.elements)

    def piece(self, flat: Tensor, parameter: nn.Parameter) -> Piece:
        return Piece(self.of(flat), getattr(parameter, "ds_shape", parameter.shape), self.first)


def pieces(engine: Any, module: nn.Module) -> Iterator[tuple[str, Stored, dict[str, Stored]]]:
    """Yield each parameter's name, the part of its weight that this rank keeps, and the parts of its optimizer state.

    Weights are in the optimizer's precision. The state (exp_avg, …, step) is empty before the first step, and of a
    frozen parameter. What is not a Piece, all ranks that have it hold whole.
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
    """Return whether the engine trains, so that forward passes compute with a copy of what the optimizer steps."""
    return any(hasattr(engine.optimizer, name) for name in ("update_lp_params", "checkpoint_event_prologue"))


def whole_beside_parts(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, by name, that stage 3 holds whole as well as in parts, as they are small."""
    parameters = names.parameters(module).items()
    return {name: one.detach() for name, one in parameters if hasattr(one, "ds_tensor") and one.numel()}


def update_working_copy(engine: Any, module: nn.Module) -> None:
    """Set the working copy of every parameter to the optimizer's, as DeepSpeed does after a step. Collective."""
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.update_lp_params()
        return
    engine.optimizer.checkpoint_event_prologue()  # frees what is gathered
    for _, parameter, part in parts(engine, module):
        if part is not None:
            parameter.ds_tensor.detach().narrow(0, 0, part.elements).copy_(part.of(part.flat.detach()))  # type: ignore[attr-defined]  # DeepSpeed's
    engine.optimizer.checkpoint_event_epilogue()  # gathers what every device holds whole


def rooms_for_states(engine: Any, module: nn.Module, saved: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Stored]:
    """Return where the optimizer's states of each parameter go, by NAME.KEY, as far as they are as large as it is.

    Args:
        saved: shapes of a checkpoint's states, by the parameter's name and the state's key.
    """
    states, rooms = _states(engine), dict[str, Stored]()
    for name, parameter, part in parts(engine, module):
        for key, like in saved.get(name, {}).items() if part is not None and parameter.requires_grad else ():
            if part is None or like.dim() == 0:
                continue
            values = states.setdefault(part.flat, {})
            if not _is_spread(values.get(key), part):
                values[key] = torch.zeros_like(part.flat, requires_grad=False)
            rooms[f"{name}.{key}"] = part.piece(values[key], parameter)
    return rooms


def scatter_weights(engine: Any, module: nn.Module, read: Callable[[str], Tensor | None]) -> None:
    """Set the working copy and the optimizer's copy of every parameter.

    Args:
        read: returns a whole parameter by its name, or None to leave it as it is.
    """
    for name, parameter, part in parts(engine, module):
        whole = read(name)
        if whole is None:
            continue
        if part is not None:
            part.of(part.flat.detach()).copy_(part.of_whole(whole))
        if hasattr(parameter, "ds_tensor"):
            kept = parameter.ds_tensor
            first = min(kept.numel() * dist.get_rank(), parameter.ds_numel)  # type: ignore[attr-defined]  # DeepSpeed's
            own = whole.reshape(-1)[first : first + kept.numel()]
            kept.detach().narrow(0, 0, own.numel()).copy_(own)  # the last rank's may end in padding
        if parameter.numel():  # at stage 3, only small parameters are whole here
            parameter.detach().copy_(whole)


def scatter_states(engine: Any, module: nn.Module, read: Callable[[str], Mapping[str, Tensor]]) -> None:
    """Set the optimizer's states of every parameter.

    Args:
        read: returns the states of a parameter, whole, by the parameter's name.

    Raises:
        Refused: parameters of one group have been trained for more steps than others.
    """
    states, first = _states(engine), dict[Tensor, tuple[str, int]]()
    for name, parameter, part in parts(engine, module):
        if part is None or not parameter.requires_grad:
            continue
        saved = read(name)
        other, step = first.setdefault(part.flat, (name, int(saved.get("step", 0))))
        _refuse_other_step(name, int(saved.get("step", 0)), other, step)
        for key, value in saved.items():
            values = states.setdefault(part.flat, {})
            if value.dim() == 0 and key == "step":  # one for a whole group
                values[key] = value.float().to(_device_of_step(engine, part.flat))
                continue
            if not _is_spread(values.get(key), part):
                values[key] = torch.zeros_like(part.flat, requires_grad=False)
            part.of(values[key]).copy_(part.of_whole(value))
    patches.replace(engine, "global_steps", max((step for _, step in first.values()), default=0))
    if engine.zero_optimization_stage() < 3:  # they were linked to the tensors before
        patches.replace(engine.optimizer, "_hp_optimizer_states_linked", False)


def _refuse_other_step(name: str, step: int, other: str, step_of_other: int) -> None:
    if step != step_of_other:
        raise Refused(
            f"{name} was trained in {step} steps and {other}, in the same group of the optimizer, in {step_of_other}, "
            "and DeepSpeed counts the steps of a group; give each a group of its own, or use strategy=fsdp"
        )


def parts(engine: Any, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Part | None]]:
    """Yield each parameter with its name and this rank's part; None where every rank keeps it whole, and no optimizer
    does."""
    zero = engine.optimizer
    groups = zip(getattr(zero, "single_partition_of_fp32_groups", ()), getattr(zero, "bit16_groups", ()), strict=True)
    flats = {id(member): flat for flat, group in groups for member in group}
    for name, parameter in names.parameters(module).items():
        yield name, parameter, _part(zero, parameter, flats.get(id(parameter)))


def _part(zero: Any, parameter: nn.Parameter, flat: Tensor | None) -> Part | None:
    """Return this rank's part of a parameter, given the flat group that it is in at stages 1 and 2."""
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
    """Return the optimizer's state by flat group, as DeepSpeed made it step over groups in place of parameters."""
    states: dict[Tensor, dict[str, Any]] = getattr(getattr(engine.optimizer, "optimizer", None), "state", {})
    return states


def _is_spread(value: object, part: Part) -> bool:
    return isinstance(value, Tensor) and value.shape == part.flat.shape


def _device_of_step(engine: Any, flat: Tensor) -> torch.device:
    """Return the device on which torch's optimizers want their step."""
    group = engine.optimizer.optimizer.param_groups[0]
    return flat.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
