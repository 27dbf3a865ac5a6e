"""Values that torch's optimizers and schedules refuse, found before processes start: each is made, and steps once."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightswitch.errors import Refused
from lightswitch.failures.classify import one_line

_TORCH = "torch.optim."  # constructors of other packages may build operators, or ask more of a parameter than it has
_OF_GPUS = "capturable"  # an argument that fails on the CPU, where this is tried

Arguments = dict[str, Any]


def refused(cfg: DictConfig) -> list[Refused]:
    """Return the arguments with which an optimizer or a schedule of torch's fails that a run's config names.

    A model makes its own in every process, once they have connected, and of a list that is too short torch tells no
    more than that an index is out of range.
    """
    if cfg.mode not in ("fit", "plan", "dry_run", "check"):  # no other makes one
        return []
    return [
        Refused(problem)
        for path, node in _nodes(cfg)
        for problem in _problems(path, instantiate(node, _convert_="all"))
    ]


def _nodes(node: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Yield the nodes that name one of torch's and leave its first argument to the model; each where it is written."""
    for key in node:  # a number, too: epochs of a GradientAccumulationScheduler
        if OmegaConf.is_interpolation(node, key) or not isinstance(node[key], DictConfig) or not node[key]:
            continue
        inner, at = node[key], f"{path}.{key}".lstrip(".")
        if str(inner.get("_target_")).startswith(_TORCH) and inner.get("_partial_"):
            yield at, inner
        yield from _nodes(inner, at)


def _problems(path: str, made: partial[Any]) -> Iterator[str]:
    """Yield each argument that fails beside others that work; nothing where none works, as the model may add some."""
    given = {key: value for key, value in made.keywords.items() if key != _OF_GPUS}
    if _error(made.func, given) is None:
        return
    parameters = inspect.signature(made.func).parameters
    defaults = {key: parameter.default for key, parameter in [*parameters.items()][1:]}
    working = {key: 1 for key, default in defaults.items() if default is inspect.Parameter.empty}
    while (key := _that_works(made.func, working, given)) is not None:
        working[key] = given.pop(key)
    if _error(made.func, working) is not None:
        return
    for key, value in given.items():
        told = one_line(cast(Exception, _error(made.func, {**working, key: value}))).rstrip(".")
        instead = "" if key in working else f"; its default is {_shown(defaults[key])}"
        yield f"{path}.{key}={_shown(value)}: {made.func.__name__} fails with it, {told}{instead}"


def _that_works(make: Callable[..., Any], working: Arguments, given: Arguments) -> str | None:
    return next((key for key, value in given.items() if _error(make, {**working, key: value}) is None), None)


def _error(make: Callable[..., Any], arguments: Arguments) -> Exception | None:
    """Return what is raised as an optimizer or a schedule is made with some arguments, and steps; None if nothing."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2))  # a matrix, as Muon takes no other
    parameter.grad = torch.zeros(2, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself tells them
            _step(make, parameter, arguments)
    except Exception as error:
        return error
    return None


def _step(make: Callable[..., Any], parameter: torch.nn.Parameter, arguments: Arguments) -> None:
    if issubclass(cast(type, make), Optimizer):
        make([parameter], **arguments).step(lambda: torch.zeros(()))  # LBFGS asks for the loss
        return
    optimizer = torch.optim.AdamW([parameter])
    schedule = make(optimizer, **arguments)
    optimizer.step()
    schedule.step(*[0.0] if isinstance(schedule, ReduceLROnPlateau) else [])


def _shown(value: object) -> str:
    """Return a value as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
