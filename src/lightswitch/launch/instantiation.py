"""Instantiation of config nodes, and the arguments that constructors, optimizers and schedules reject."""

from __future__ import annotations

import inspect
import json
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import dropwhile
from typing import Any, cast

import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from omegaconf import DictConfig, OmegaConf, open_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightswitch.config import hydra_versions
from lightswitch.config.hydra_versions import instantiate
from lightswitch.errors import Refused, RefusedRequest
from lightswitch.failures import classify
from lightswitch.failures.classify import full_traceback, one_line
from lightswitch.preflight.targets import ENGINE_KEYS, parameters

# A constructor raises the first about files that its arguments name and, by a `raise` statement, the second about the
# arguments. Any other error is a bug.
_ABOUT_FILES = (OSError, ModuleNotFoundError)
_ABOUT_ARGUMENTS = (ValueError, MisconfigurationException)

_OF_VALUES = (TypeError, ValueError, AttributeError)  # raised for a value of an unexpected type
_LIBRARIES = ("lightning", "lightswitch", "torch")  # their messages about arguments need no traceback
_TORCH = "torch.optim."  # constructors of other packages may build operators, or need special parameters
_OF_GPUS = "capturable"  # an argument that fails on the CPU, on which optimizers are tried
_VISIBLE = "CUDA_VISIBLE_DEVICES"

OF_PYTORCH_LIGHTNING = (
    "; in the file that defines it, write import lightning.pytorch as pl for import pytorch_lightning as pl"
)

Arguments = dict[str, Any]


def instantiated(cfg: DictConfig, name: str, refusals: list[Refused], **arguments: Any) -> Any:
    """Instantiate a config node; if its arguments are rejected, append the refusal to ``refusals`` and return None.

    Lists and dicts become plain Python objects: OmegaConf's would make checkpoints unsafe to read.
    """
    try:
        return instantiate(_node(cfg, name), **arguments) if cfg.get(name) is not None else None
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, Refused):
            refusals.append(cause)
            return None
        key = getattr(error, "full_key", None) or name
        if message := _unimported(cfg, key, cause) or _unlike(cfg, key, cause):
            refusals.append(RefusedRequest([message], full_traceback(error)))
            return None
        if not (isinstance(cause, _ABOUT_FILES) or (isinstance(cause, _ABOUT_ARGUMENTS) and classify.raised_in(cause))):
            raise
        message = str(cause)
        details = full_traceback(cause) if _is_of_user(cause) else ""
        refusals.append(RefusedRequest([message if message.startswith(name) else f"{key}: {message}"], details))
        return None


def _unimported(cfg: DictConfig, key: str, cause: BaseException | None) -> str | None:
    """Return a message about a failed import of a module that the config names; None if the error is another."""
    if not isinstance(cause, ImportError):
        return None
    while isinstance(cause.__cause__, ImportError):  # Hydra's error only names the module
        cause = cause.__cause__
    if str(cause).startswith("Error loading"):  # Hydra's message for a bug in the module
        return None
    if str(cause).startswith(key.partition(".")[0]):  # a constructor's message
        return str(cause)
    target = OmegaConf.select(cfg, f"{key}._target_")  # None for a node of several objects
    hint = OF_PYTORCH_LIGHTNING if "pytorch_lightning" in str(cause) else ""
    return f"{key}: {cause}{hint}" if target is None else f"{key}._target_={target}: importing it fails: {cause}{hint}"


def _unlike(cfg: DictConfig, key: str, cause: BaseException | None) -> str | None:
    """Return a message about the value of an untyped argument with which a constructor fails; None if there is none.

    The value is a string or null, and the argument's default is a number or a bool, or there is no default.
    """
    node = OmegaConf.select(cfg, key)
    if not isinstance(cause, _OF_VALUES) or not re.search(r"\b(str|NoneType)\b", str(cause)):
        return None
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return None
    takes = parameters(str(node._target_))
    for name in (name for name in node if name in takes and not takes[name].annotation):
        value, default = node[name], takes[name].default
        if isinstance(value, str | None) and (default is None or re.fullmatch(r"-?[\d.e+-]+|True|False", default)):
            expected = "expected a number or true or false" if default is None else f"expected a value like {default}"
            found = "null" if value is None else value
            failed = f"{str(node._target_).rpartition('.')[2]} declares no type for it, and fails: {one_line(cause)}"
            return f"{key}.{name}={found}: found {type(value).__name__}, {expected}; {failed}"
    return None


def raise_all(refusals: list[Refused]) -> None:
    """Raise all refusals as one error, if there are any.

    Raises:
        RefusedRequest: with the lines of each.
    """
    if refusals:
        lines = [problem for refusal in refusals for problem in refusal.problems]
        raise RefusedRequest(lines, "\n".join(refusal.details for refusal in refusals if refusal.details))


def plugins(cfg: DictConfig, cluster: Any, refusals: list[Refused], strategy: Strategy | None = None) -> dict[str, Any]:
    """Return the Trainer's arguments for the cluster environment and for a precision that is passed as a plugin.

    These precisions are those that the config names by class, and 64-true and 16-mixed: Lightning rejects these names
    with fully_shard, which supports any dtype.
    """
    precision = cfg.trainer.get("precision")
    if isinstance(precision, DictConfig):
        plugin = instantiated(cfg.trainer, "precision", refusals)
    elif str(precision) in ("64", "64-true"):
        plugin = DoublePrecision()
    elif str(precision) in ("16", "16-mixed") and isinstance(strategy, ModelParallelStrategy):
        plugin = MixedPrecision("16-mixed", "cuda")
    else:
        return {"plugins": cluster}
    return {"plugins": [one for one in (cluster, plugin) if one is not None], "precision": None}


def shards_itself(cfg: DictConfig) -> bool:
    """Return whether the config declares that datasets without indices split themselves between ranks."""
    return bool(cfg.get("data") and cfg.data.get("sharded_by") == "dataset")


def _node(cfg: DictConfig, name: str) -> Any:
    """Return a config node without the keys that only the engine reads."""
    own = [key for key in ENGINE_KEYS.get(name, ()) if key in cfg[name]]
    if not own:
        return cfg[name]
    whole = cfg.copy()  # Hydra 1.4 copies a node from the whole config that it belongs to
    with open_dict(whole):
        for key in own:
            del whole[name][key]
    return whole[name]


def _is_of_user(error: BaseException) -> bool:
    """Return whether the constructor that Hydra called when the error was raised is user code."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [*dropwhile(lambda module: module.startswith(("hydra.", hydra_versions.__name__)), modules)]
    return bool(called) and called[0].partition(".")[0] not in _LIBRARIES


def refused_optimizers(cfg: DictConfig) -> list[Refused]:
    """Return the arguments in a config with which one of torch's optimizers or schedules fails.

    Otherwise they would fail only in the model, in every process, after all have connected; and for a list that is too
    short, torch only reports an index out of range.
    """
    if cfg.mode not in ("fit", "plan", "dry_run", "check"):  # no other mode creates one
        return []
    return [Refused(problem) for path, node in _nodes(cfg) for problem in _problems(path, instantiate(node))]


def _nodes(node: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Yield each `_partial_` node of a torch optimizer or schedule, with the path at which it is defined."""
    for key in node:  # a key may be a number
        if OmegaConf.is_interpolation(node, key) or not isinstance(node[key], DictConfig) or not node[key]:
            continue
        inner, at = node[key], f"{path}.{key}".lstrip(".")
        if str(inner.get("_target_")).startswith(_TORCH) and inner.get("_partial_"):
            yield at, inner
        yield from _nodes(inner, at)


def _problems(path: str, made: partial[Any]) -> Iterator[str]:
    """Yield each argument that fails together with those that work.

    Yield nothing if no combination works, as the model may add arguments.
    """
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
        message = one_line(cast(Exception, _error(made.func, {**working, key: value}))).rstrip(".")
        instead = "" if key in working else f"; its default is {_shown(defaults[key])}"
        yield f"{path}.{key}={_shown(value)}: {made.func.__name__} fails with it: {message}{instead}"


def _that_works(make: Callable[..., Any], working: Arguments, given: Arguments) -> str | None:
    return next((key for key, value in given.items() if _error(make, {**working, key: value}) is None), None)


def _error(make: Callable[..., Any], arguments: Arguments) -> Exception | None:
    """Return the error of creating and stepping an optimizer or schedule with some arguments; None if there is none."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2))  # a matrix, as Muon accepts nothing else
    parameter.grad = torch.zeros(2, 2)
    try:
        with warnings.catch_warnings(), _hidden_gpus():
            warnings.simplefilter("ignore")  # the run itself shows them
            _step(make, parameter, arguments)
    except Exception as error:
        return error
    return None


def _step(make: Callable[..., Any], parameter: torch.nn.Parameter, arguments: Arguments) -> None:
    if issubclass(cast(type, make), Optimizer):
        make([parameter], **arguments).step(lambda: torch.zeros(()))  # LBFGS needs a function that returns the loss
        return
    optimizer = torch.optim.AdamW([parameter])
    schedule = make(optimizer, **arguments)
    optimizer.step()
    schedule.step(*[0.0] if isinstance(schedule, ReduceLROnPlateau) else [])


@contextmanager
def _hidden_gpus() -> Iterator[None]:
    """Hide them from an optimizer's step.

    It asks CUDA whether a graph is captured, which opens the driver in this process without torch's knowing; no process
    forked from it, such as a plan's, can use a GPU then.
    """
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        del os.environ[_VISIBLE]
        if before is not None:
            os.environ[_VISIBLE] = before


def _shown(value: object) -> str:
    """Return a value as typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
