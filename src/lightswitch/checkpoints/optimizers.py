"""States of optimizers by the names of parameters, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightswitch.checkpoints import names
from lightswitch.errors import UnfitCheckpoint

Groups = list[dict[str, Any]]  # an optimizer's param_groups, with names in place of parameters

_COMPUTED = ("foreach", "fused", "capturable", "differentiable")


def groups_of(optimizer: Optimizer, module: nn.Module) -> Groups:
    """Return the optimizer's parameter groups, with names in place of parameters."""
    of = names.names_of(module)
    return [{**group, "params": [of[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's options but for those of how its step is computed, which are the run's that loads it."""
    return {key: value for key, value in group.items() if key not in ("params", *_COMPUTED)}


def state_of(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's class, its state by parameter names, and its groups."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # LightningOptimizer's
    of = names.names_of(module)
    state = {of[id(parameter)]: values for parameter, values in optimizer.state.items()}
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups_of(optimizer, module)}


def load(optimizer: Optimizer, live: Groups, state: Mapping[str, dict[str, Any]], saved: Groups) -> None:
    """Load an optimizer's state by parameter names: `load_state_dict` takes numbers, and strategies may reorder them.

    Args:
        live: the optimizer's own groups.
        state: the state of each parameter, by its name.
        saved: the groups of the checkpoint, in the order of `live`.
    """
    number = {name: index for index, name in enumerate(name for group in live for name in group["params"])}
    optimizer.load_state_dict(
        {
            "state": {number[name]: values for name, values in state.items()},
            "param_groups": [
                {**group, **options_of(of_checkpoint), "params": [number[name] for name in group["params"]]}
                for group, of_checkpoint in zip(live, saved, strict=True)
            ],
        }
    )


def check(path: Path, here: Sequence[tuple[str, Groups]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that a checkpoint's optimizers are of the same classes and over the same parameters as a run's.

    Args:
        path: of the checkpoint.
        here: class and groups of each optimizer of the run.
        saved: the checkpoint's `optimizer_states`.

    Raises:
        UnfitCheckpoint: they are not.
    """
    there = [(one["class"], one["param_groups"]) for one in saved]
    if _members(here) != _members(there):
        raise UnfitCheckpoint(
            f"{path} holds the state of {_described(there)}, and this run has {_described(here)}; "
            f"to start from its weights alone, type init_from={path} and another run_id"
        )


def _members(optimizers: Sequence[tuple[str, Groups]]) -> list[tuple[str, list[set[str]]]]:
    return [(name, [set(group["params"]) for group in groups]) for name, groups in optimizers]


def _described(optimizers: Sequence[tuple[str, Groups]]) -> str:
    told = []
    for name, groups in optimizers:
        counts = " + ".join(str(len(group["params"])) for group in groups)
        first = ", ".join(group["params"][0] for group in groups if group["params"])
        told.append(f"{name} over {counts} parameters ({first}, …)")
    return "; ".join(told)
