"""Names of parameters in the user's module, without the prefixes of wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from lightswitch.checkpoints.shards import Piece
from lightswitch.errors import UnfitCheckpoint

Kept = TypeVar("Kept")

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def own_name(name: str) -> str:
    """Return a name without the prefixes of torch.compile, FSDP and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, by its first name."""
    return {own_name(name): parameter for name, parameter in module.named_parameters()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's `state_dict`, with each tied tensor only under its first name."""
    again = tied(module)
    named = ((own_name(name), value) for name, value in module.state_dict().items())
    return {name: value for name, value in named if name not in again}


def without(state: Mapping[str, Kept], left_out: Iterable[str]) -> dict[str, Kept]:
    """Return the entries of a state except the named ones."""
    names = set(left_out)
    return {name: value for name, value in state.items() if name not in names}


def tied(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter or saved buffer, by each of its other names."""
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


def hand_over(module: nn.Module, state: Mapping[str, Any], device: torch.device) -> None:
    """Load the entries of modules' states that are no parameters, by name: buffers, metric states and extra state.

    Modules load them by their own code, as `state_dict` may contain copies. This avoids `load_state_dict` of the whole
    module, in which a strategy may have hooks.

    Args:
        device: the device for buffers and metric states; extra state is passed unchanged.

    Raises:
        UnfitCheckpoint: a module can't load its entry.
    """
    # a wrapper and its module have the same name, and the module comes last
    owners = {own_name(f"{path}.").strip("."): part for path, part in module.named_modules()}
    of_owners: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        if (path := name.rpartition(".")[0]) in owners:
            of_owners.setdefault(path, {})[name] = value
    errors: list[str] = []
    for path, own in of_owners.items():
        part, prefix = owners[path], f"{path}." if path else ""
        extra = [own.pop(name) for name in (f"{prefix}_extra_state",) if name in own]
        if own:
            part._load_from_state_dict(move_data_to_device(own, device), prefix, {}, False, [], [], errors)
        if extra and type(part).set_extra_state is not nn.Module.set_extra_state:
            part.set_extra_state(*extra)
    if errors:
        raise UnfitCheckpoint(errors[0])


def names_of(module: nn.Module) -> dict[int, str]:
    """Return the names of parameters by their identity (`id`)."""
    return {id(parameter): name for name, parameter in parameters(module).items()}


def is_stored(value: object) -> TypeGuard[Tensor | Piece]:
    """Return whether a value is stored as a tensor; all others, and sparse tensors, are stored in trainer.pt."""
    return isinstance(value, Piece) or (isinstance(value, Tensor) and value.layout == torch.strided)


def tensors_in(state: dict[str, dict[str, Any]]) -> dict[str, Tensor | Piece]:
    """Return every tensor in an optimizer's state by `<name>.<key>`, given the state by parameter name."""
    return {
        f"{name}.{key}": value for name, values in state.items() for key, value in values.items() if is_stored(value)
    }
