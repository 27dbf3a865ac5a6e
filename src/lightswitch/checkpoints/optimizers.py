"""Optimizer states by parameter name, as stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightswitch.checkpoints import names
from lightswitch.errors import Refused, UnfitCheckpoint

Groups = list[dict[str, Any]]  # an optimizer's param_groups, with names in place of parameters

_COMMON = "common_state"  # key of an optimizer in a checkpoint
_COMPUTED = ("foreach", "fused", "capturable", "differentiable")


def groups_of(optimizer: Optimizer, module: nn.Module) -> Groups:
    """Return the optimizer's parameter groups, with names in place of parameters.

    Raises:
        Refused: the optimizer holds a tensor that is not a parameter of the module.
    """
    of = names.names_of(module)
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise Refused(
            "ZeroRedundancyOptimizer keeps the state of a part of the parameters on each device, which checkpoints do "
            "not gather; use its inner optimizer with strategy=deepspeed_stage_1 or strategy=fsdp, which shard states"
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
    """Load an optimizer's state by parameter name: `load_state_dict` takes indices, which strategies may reorder.

    Args:
        live: the optimizer's current groups.
        state: the state of each parameter, by its name.
        saved: the optimizer in the checkpoint, with its groups in the order of `live`.

    Raises:
        UnfitCheckpoint: the optimizer class's `load_state_dict` needs entries that no checkpoint holds.
    """
    groups = [{**group, **options_of(of_saved)} for group, of_saved in zip(live, saved["param_groups"], strict=True)]
    inside = list(parts(optimizer))[1:]
    if not inside:
        try:
            numbered = _numbered(groups, state)
            optimizer.load_state_dict({**numbered, "state": {**numbered["state"], **saved.get(_COMMON, {})}})
            _keep_dtypes(optimizer, numbered["state"])
        except KeyError as error:
            raise UnfitCheckpoint(
                f"load_state_dict of {type(optimizer).__name__} requires {error}, but checkpoints contain only its "
                "state and param_groups; to load only the weights, type init_from=PATH and another run_id"
            ) from error
        return
    for group, of_saved in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(options_of(of_saved))  # in place: inner optimizers may have the same groups, by whatever way
    _load_part(optimizer, _numbered(groups, _of_part(state, "")))
    own = zip(optimizer.param_groups, live, strict=True)
    of = {id(p): name for group, named in own for p, name in zip(group["params"], named["params"], strict=True)}
    for path, part in inside:
        groups = [{**group, "params": [of[id(p)] for p in group["params"]]} for group in part.param_groups]
        _load_part(part, _numbered(groups, _of_part(state, path)))


def _of_part(state: Mapping[str, dict[str, Any]], path: str) -> dict[str, dict[str, Any]]:
    """Return the state of the optimizer at a path, with the path removed from the keys."""
    found = {
        name: {key.removeprefix(path): value for key, value in values.items() if key[: key.rfind("/") + 1] == path}
        for name, values in state.items()
    }
    return {name: values for name, values in found.items() if values}


def _numbered(groups: Groups, state: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a state in the form of `Optimizer.load_state_dict`, with indices in place of names."""
    number = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {number[name]: values for name, values in state.items()},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }


def _load_part(part: Optimizer, state: dict[str, Any]) -> None:
    """Load the state of one of several nested optimizers. They may share groups, so the groups stay the same objects.

    This calls torch's `load_state_dict`: that of a nesting class expects the states of all in its own format.
    """
    kept, groups = part.state, part.param_groups
    Optimizer.__setstate__(part, {})  # some such classes skip torch's constructor, and lack the attributes it sets
    Optimizer.load_state_dict(part, state)
    _keep_dtypes(part, state["state"])
    kept.clear()
    kept.update(part.state)
    for group, loaded in zip(groups, part.param_groups, strict=True):
        group.update(loaded)
    Optimizer.__setstate__(part, {"state": kept, "param_groups": groups})


def _keep_dtypes(part: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Give tensors their dtypes again, as torch casts all to that of their parameter, even counts and masks."""
    for number, parameter in enumerate(parameter for group in part.param_groups for parameter in group["params"]):
        own = part.state.get(parameter, {})
        for key, value in state.get(number, {}).items():
            if isinstance(value, Tensor) and isinstance(cast := own.get(key), Tensor) and cast.dtype != value.dtype:
                own[key] = value.to(cast.device)


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
