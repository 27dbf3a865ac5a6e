"""Parameters under their own names, whatever wraps the modules they are in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from lightswitch.checkpoints.piece import Piece

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def own_name(name: str) -> str:
    """Without what torch.compile, FSDP and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Each once, under the first of its names."""
    return {own_name(name): parameter for name, parameter in module.named_parameters()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """`state_dict` with a tensor that has several names under the first of them."""
    return first_names({own_name(name): value for name, value in module.state_dict().items()}, module)


def first_names(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Of ``state`` by name, what stands under the first name of its tensor."""
    again = tied(module)
    return {name: value for name, value in state.items() if name not in again}


def tied(module: nn.Module) -> dict[str, str]:
    """Of parameters and buffers that have several names and are saved, the first by each of the others."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in _saved(module)}
    return {name: other for name, other in names.items() if name != other}


def _saved(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Under all names, in the order of `state_dict`, which may have to gather what is sharded."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        buffers = {name: b for name, b in part._buffers.items() if name not in part._non_persistent_buffers_set}
        for name, value in {**part._parameters, **buffers}.items():
            if value is not None:
                yield own_name(f"{prefix}.{name}" if prefix else name), value


def set_extra_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Of modules that keep what is no tensor. Not by `load_state_dict`, in which a strategy may have hooks."""
    for path, part in module.named_modules():
        name = own_name(f"{path}._extra_state".lstrip("."))
        if name in state and type(part).set_extra_state is not nn.Module.set_extra_state:  # not one that wraps it
            part.set_extra_state(state[name])


def groups_of(optimizer: Optimizer, module: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, with names in place of parameters."""
    names = names_of(module)
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def names_of(module: nn.Module) -> dict[int, str]:
    """Names by the parameters' identity."""
    return {id(parameter): name for name, parameter in parameters(module).items()}


def is_stored(value: object) -> TypeGuard[Tensor | Piece]:
    """As a tensor; all else goes into the small file beside them."""
    return isinstance(value, Tensor | Piece)


def tensors_in(state: dict[str, dict[str, Any]]) -> dict[str, Tensor | Piece]:
    """`<name>.<key>` of every tensor of an optimizer's state by name."""
    return {
        f"{name}.{key}": value for name, values in state.items() for key, value in values.items() if is_stored(value)
    }
