"""Optimizer states by parameter name, as stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torch.optim import Optimizer

from lightswitch.checkpoints import names
from lightswitch.errors import Refused, UnfitCheckpoint, listed

Groups = list[dict[str, Any]]  # an optimizer's param_groups, with names in place of parameters

_COMMON = "common_state"  # key of an optimizer in a checkpoint
_COMPUTED = ("foreach", "fused", "capturable", "differentiable")


def groups_of(optimizer: Optimizer, module: nn.Module) -> Groups:
    """Return the optimizer's parameter groups, with names in place of parameters.

    Raises:
        Refused: the optimizer holds a tensor that is not a parameter of the module, or state of another form.
    """
    of = names.names_of(module)
    is_around_another = len([*parts(optimizer)]) > 1  # its format is its own, its parts are stored
    if more := () if is_around_another else sorted(optimizer.state_dict().keys() - {"state", "param_groups"}):
        raise Refused(
            f"state_dict of {type(optimizer).__name__} has {listed(more)}, but checkpoints store only its state and "
            "param_groups; put these values into param_groups, or into the state of a parameter"
        )
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in of:
            raise Refused(
                f"{type(optimizer).__name__} optimizes a tensor of shape {tuple(parameter.shape)} that is not a "
                "parameter of the module, but checkpoints store its state by parameter names; register it in the "
                "module as an nn.Parameter"
            )
    return [{**group, "params": [of[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def parts(optimizer: Optimizer, path: str = "", around: tuple[Any, ...] = ()) -> Iterator[tuple[str, Optimizer]]:
    """Yield an optimizer and its inner optimizers that have a separate state, as in Lookahead or SAM.

    Each comes with the path of attributes that leads to it: "", "base_optimizer/".

    Args:
        path: the path of this optimizer.
        around: the states of the optimizers that contain it.
    """
    yield path, optimizer
    around = (*around, optimizer.state)
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and not any(value.state is state for state in around):
            yield from parts(value, f"{path}{name}/", around)


def described(optimizer: Optimizer) -> str:
    """Return the class names of an optimizer and its inner optimizers: "Lookahead(AdamW)"."""
    name, *inside = [type(part).__name__ for _, part in parts(optimizer)]
    return f"{name}({', '.join(inside)})" if inside else name


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's options without those for the implementation of the step, which the loading run sets."""
    return {key: value for key, value in group.items() if key not in ("params", *_COMPUTED)}


def state_of(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's class, its state by parameter name, and its groups."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # LightningOptimizer's
    of = names.names_of(module)
    groups = groups_of(optimizer, module)
    state: dict[str, dict[str, Any]] = {}
    common: dict[Any, Any] = {}  # of no parameter, for example a count of steps
    for path, part in parts(optimizer):
        for parameter, values in part.state.items():
            if id(parameter) not in of:
                common |= {} if path else {parameter: values}
                continue
            of_parameter = {f"{path}{key}" if path else key: value for key, value in values.items()}
            state.setdefault(of[id(parameter)], {}).update(of_parameter)
    return {"class": described(optimizer), "state": state, "param_groups": groups, _COMMON: common}


def load(optimizer: Optimizer, live: Groups, state: Mapping[str, dict[str, Any]], saved: Mapping[str, Any]) -> None:
    """Set an optimizer's state by parameter name, in the dtypes that it was saved in.

    `load_state_dict` takes indices, which strategies may reorder; casts all values to the dtype of their parameter,
    even counts and masks; and in an optimizer around another one expects the states of both in its own format.

    Args:
        live: the optimizer's current groups.
        state: the state of each parameter, by its name.
        saved: the optimizer in the checkpoint, with its groups in the order of `live`.
    """
    for group, of_saved in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(options_of(of_saved))  # in place: inner optimizers may have the same groups
    optimizer.state.update(saved.get(_COMMON, {}))
    for group, named in zip(optimizer.param_groups, live, strict=True):
        takes_steps_there = group.get("fused") or group.get("capturable")  # torch's other kernels count on the CPU
        for parameter, name in zip(group["params"], named["params"], strict=True):
            for path, part in parts(optimizer):
                own = {key.removeprefix(path): value for key, value in state.get(name, {}).items() if _is_of(key, path)}
                there = move_data_to_device(own, parameter.device)
                if "step" in own and not takes_steps_there:
                    there["step"] = own["step"]
                if own:
                    part.state[parameter] = there


def _is_of(key: str, path: str) -> bool:
    return key[: key.rfind("/") + 1] == path


def check(path: Path, here: Sequence[tuple[str, Groups]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that a checkpoint's optimizers have the same classes and parameters as those of a run.

    Args:
        path: the path of the checkpoint.
        here: class and groups of each optimizer of the run.
        saved: the checkpoint's `optimizer_states`.

    Raises:
        UnfitCheckpoint: they are not.
    """
    there = [(one["class"], one["param_groups"]) for one in saved]
    if _members(here) != _members(there):
        raise UnfitCheckpoint(
            f"{path} contains the state of {_described(there)}, but this run has {_described(here)}; "
            f"to load only its weights, type init_from={path} and another run_id"
        )


def _members(optimizers: Sequence[tuple[str, Groups]]) -> list[tuple[str, list[set[str]]]]:
    return [(name, [set(group["params"]) for group in groups]) for name, groups in optimizers]


def _described(optimizers: Sequence[tuple[str, Groups]]) -> str:
    texts = []
    for name, groups in optimizers:
        counts = " + ".join(str(len(group["params"])) for group in groups)
        first = ", ".join(group["params"][0] for group in groups if group["params"])
        texts.append(f"{name} over {counts} parameters ({first}, …)")
    return "; ".join(texts)
