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
from lightswitch.checkpoints.piece import Piece, Stored


@dataclass(frozen=True)
class _Part:
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
    for name, parameter in names.parameters(module).items():
        part = _part(engine, parameter)
        if part is None:
            yield name, parameter.detach(), {}
            continue
        values = _states(engine).get(part.flat, {})
        state: dict[str, Stored] = {
            key: part.piece(value, parameter) if _is_spread(value, part) else torch.as_tensor(value)
            for key, value in values.items()
        }
        yield name, part.piece(part.flat.detach(), parameter), state


def scatter_weights(engine: Any, module: nn.Module, read: Callable[[str], Tensor | None]) -> None:
    """Set the working copy and the optimizer's copy of every parameter.

    Args:
        read: returns a whole parameter by its name, or None to leave it as it is.
    """
    for name, parameter in names.parameters(module).items():
        whole, part = read(name), _part(engine, parameter)
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
    """
    states, steps = _states(engine), [0]
    for name, parameter in names.parameters(module).items():
        part = _part(engine, parameter) if parameter.requires_grad else None
        for key, value in read(name).items() if part is not None else ():
            assert part is not None
            values = states.setdefault(part.flat, {})
            if value.dim() == 0 and key == "step":  # one for a whole group
                steps.append(int(value))
                values[key] = value.float().to(_device_of_step(engine, part.flat))
                continue
            if not _is_spread(values.get(key), part):
                values[key] = torch.zeros_like(part.flat, requires_grad=False)
            part.of(values[key]).copy_(part.of_whole(value))
    patches.replace(engine, "global_steps", max(steps))
    if engine.zero_optimization_stage() < 3:  # they were linked to the tensors before
        patches.replace(engine.optimizer, "_hp_optimizer_states_linked", False)


def _part(engine: Any, parameter: nn.Parameter) -> _Part | None:
    """Return this rank's part of a parameter; None for one that every rank keeps whole and no optimizer keeps."""
    zero, rank = engine.optimizer, dist.get_rank()
    if hasattr(parameter, "ds_tensor"):
        positions, number = getattr(zero, "grad_position", {}), getattr(parameter, "ds_id", None)
        if parameter.requires_grad and number in positions:
            group, begin, elements = positions[number]
            flat = zero.fp32_partitioned_groups_flat[group]
        else:
            flat, begin, elements = parameter.ds_tensor.detach(), 0, parameter.ds_tensor.numel()
        first = min(elements * rank, parameter.ds_numel)  # type: ignore[attr-defined]  # DeepSpeed's
        return _Part(flat, begin, first, min(elements, parameter.ds_numel - first))  # type: ignore[attr-defined]  # DeepSpeed's
    for flat, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        if any(member is parameter for member in group):
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
            if mapping is None:
                return _Part(flat, 0, 0, 0)
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            return _Part(flat, here.start, there.start, here.numel)
    return None


def _states(engine: Any) -> dict[Tensor, dict[str, Any]]:
    """Return the optimizer's state by flat group, as DeepSpeed made it step over groups in place of parameters."""
    states: dict[Tensor, dict[str, Any]] = getattr(getattr(engine.optimizer, "optimizer", None), "state", {})
    return states


def _is_spread(value: object, part: _Part) -> bool:
    return isinstance(value, Tensor) and value.shape == part.flat.shape


def _device_of_step(engine: Any, flat: Tensor) -> torch.device:
    """Return the device on which torch's optimizers want their step."""
    group = engine.optimizer.optimizer.param_groups[0]
    return flat.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
