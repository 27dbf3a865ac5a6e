"""Instantiation of config nodes, and the refusals of constructors that reject their arguments."""

from __future__ import annotations

import traceback
from itertools import dropwhile
from typing import Any

from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from omegaconf import DictConfig, open_dict

from lightswitch.config import hydra_versions
from lightswitch.config.hydra_versions import instantiate
from lightswitch.errors import Refused, RefusedRequest
from lightswitch.failures import classify
from lightswitch.failures.classify import full_traceback
from lightswitch.preflight.targets import ENGINE_KEYS

# A constructor raises the first about files that its arguments name and, by a `raise` statement, the second about the
# arguments. Any other error is a bug.
_ABOUT_FILES = (OSError, ModuleNotFoundError)
_ABOUT_ARGUMENTS = (ValueError, MisconfigurationException)

_LIBRARIES = ("lightning", "lightswitch", "torch")  # their messages about arguments need no traceback


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
        if not (isinstance(cause, _ABOUT_FILES) or (isinstance(cause, _ABOUT_ARGUMENTS) and classify.raised_in(cause))):
            raise
        message = str(cause)
        details = full_traceback(cause) if _is_of_user(cause) else ""
        refusals.append(RefusedRequest([message if message.startswith(name) else f"{key}: {message}"], details))
        return None


def _node(cfg: DictConfig, name: str) -> Any:
    """Return a config node without the keys that only the engine reads."""
    own = [key for key in ENGINE_KEYS.get(name, ()) if key in cfg[name]]
    whole = cfg.copy() if own else cfg  # Hydra 1.4 copies a node from the whole config that it belongs to
    with open_dict(whole):
        for key in own:
            del whole[name][key]
    return whole[name]


def _is_of_user(error: BaseException) -> bool:
    """Return whether the constructor that Hydra called when the error was raised is user code."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [*dropwhile(lambda module: module.startswith(("hydra.", hydra_versions.__name__)), modules)]
    return bool(called) and called[0].partition(".")[0] not in _LIBRARIES


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
