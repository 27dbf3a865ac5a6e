"""Names of parameters as the module itself has them, whatever wraps the modules they are in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from lightswitch.checkpoints.shards import Piece

Kept = TypeVar("Kept")

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def own_name(name: str) -> str:
    """Return a name without what torch.compile, FSDP and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, by the first of its names."""
    return {own_name(name): parameter for name, parameter in module.named_parameters()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's `state_dict`, in which a tensor that has several names is under the first of them."""
    return first_names({own_name(name): value for name, value in module.state_dict().items()}, module)


def first_names(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return the entries of a state whose names are the first ones of their tensors."""
    again = tied(module)
    return {name: value for name, value in state.items() if name not in again}


def without(state: Mapping[str, Kept], left_out: Iterable[str]) -> dict[str, Kept]:
    """Return the entries of a state but for those of some names."""
    names = set(left_out)
    return {name: value for name, value in state.items() if name not in names}


def tied(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter or saved buffer that has several, by each of its other names."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in _saved(module)}
    return {name: other for name, other in names.items() if name != other}


def _saved(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers under all their names, without `state_dict`, which may gather shards."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        buffers = {name: b for name, b in part._buffers.items() if name not in part._non_persistent_buffers_set}
        for name, value in {**part._parameters, **buffers}.items():
            if value is not None:
                yield own_name(f"{prefix}.{name}" if prefix else name), value


def loose(module: nn.Module, state: Iterable[str]) -> set[str]:
    """Return the names in a module's state that are neither parameters nor buffers: extra state, states of metrics.

    What `state_dict` has of them may be copies, so that writing into those restores nothing.
    """
    return set(state) - {name for name, _ in _saved(module)}


def hand_over(module: nn.Module, state: Mapping[str, Any], device: torch.device) -> None:
    """Give modules the parts of their state that are neither parameters nor buffers, by name.

    Not by `load_state_dict`, in which a strategy may have hooks.

    Args:
        device: of the states of metrics; extra state is given as it is.
    """
    # of a module and what wraps it, which have the same name, the module comes last
    owners = {own_name(f"{path}.").strip("."): part for path, part in module.named_modules()}
    for name, value in state.items():
        path, _, key = name.rpartition(".")
        part = owners.get(path)
        if part is None:
            continue
        if key != "_extra_state":
            prefix = name.removesuffix(key)
            part._load_from_state_dict({name: move_data_to_device(value, device)}, prefix, {}, False, [], [], [])
        elif type(part).set_extra_state is not nn.Module.set_extra_state:
            part.set_extra_state(value)


def names_of(module: nn.Module) -> dict[int, str]:
    """Return names by the parameters' identity (`id`)."""
    return {id(parameter): name for name, parameter in parameters(module).items()}


def is_stored(value: object) -> TypeGuard[Tensor | Piece]:
    """Return whether a value is stored as a tensor; all else goes into the small file beside them."""
    return isinstance(value, Tensor | Piece)


def tensors_in(state: dict[str, dict[str, Any]]) -> dict[str, Tensor | Piece]:
    """Return every tensor of an optimizer's state by `<name>.<key>`, given the state by parameter name."""
    return {
        f"{name}.{key}": value for name, values in state.items() for key, value in values.items() if is_stored(value)
    }
