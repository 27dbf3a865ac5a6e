"""Objects made from the config's nodes, and what their constructors refuse: it is collected, to be told at once."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import DoublePrecision
from omegaconf import DictConfig, open_dict

from lightswitch.errors import Refused, RefusedRequest
from lightswitch.fault_tolerance import classify
from lightswitch.fault_tolerance.failure import full_traceback
from lightswitch.preflight.targets import ENGINE_KEYS

# A constructor raises these about files that its arguments name and, by a `raise` statement, about the arguments.
# Any other error is a bug.
_ABOUT_FILES = (OSError, ModuleNotFoundError)
_ABOUT_ARGUMENTS = (ValueError, MisconfigurationException)

_LIBRARIES = ("lightning", "lightswitch", "torch")  # their messages about arguments need no traceback


def instantiated(cfg: DictConfig, name: str, refusals: list[Refused], **arguments: Any) -> Any:
    """Instantiate a config node, with lists and dicts as Python's own: OmegaConf's make checkpoints unsafe to read."""
    try:
        return instantiate(_node(cfg, name), **arguments, _convert_="all") if cfg.get(name) is not None else None
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, Refused):
            refusals.append(cause)
            return None
        if not (isinstance(cause, _ABOUT_FILES) or (isinstance(cause, _ABOUT_ARGUMENTS) and classify.raised_in(cause))):
            raise
        key = getattr(error, "full_key", None) or name
        told = str(cause)
        details = full_traceback(cause) if _is_of_user(cause) else ""
        refusals.append(RefusedRequest([told if told.startswith(name) else f"{key}: {told}"], details))
        return None


def raise_all(refusals: list[Refused]) -> None:
    """Raise what was refused, all at once, if anything was.

    Raises:
        RefusedRequest: with the lines of each.
    """
    if refusals:
        lines = [problem for refusal in refusals for problem in refusal.problems]
        raise RefusedRequest(lines, "\n".join(refusal.details for refusal in refusals if refusal.details))


def plugins(cfg: DictConfig, cluster: Any, refusals: list[Refused]) -> dict[str, Any]:
    """Return the Trainer's arguments for the cluster environment and for a precision that has no name of Lightning's.

    These are precisions that the config names by their class, and 64-true: Lightning refuses that name with
    fully_shard, which takes any dtype.
    """
    precision = cfg.trainer.get("precision")
    if isinstance(precision, DictConfig):
        plugin = instantiated(cfg.trainer, "precision", refusals)
    elif str(precision) in ("64", "64-true"):
        plugin = DoublePrecision()
    else:
        return {"plugins": cluster}
    return {"plugins": [one for one in (cluster, plugin) if one is not None], "precision": None}


def shards_itself(cfg: DictConfig) -> bool:
    """Return whether the user has declared that datasets without indices split themselves by ranks."""
    return bool(cfg.get("data") and cfg.data.get("sharded_by") == "dataset")


def _node(cfg: DictConfig, name: str) -> Any:
    """Return a config node without the keys that are the engine's own."""
    own = [key for key in ENGINE_KEYS.get(name, ()) if key in cfg[name]]
    if not own:
        return cfg[name]
    node = cfg[name].copy()
    with open_dict(node):
        for key in own:
            del node[key]
    return node


def _is_of_user(error: BaseException) -> bool:
    """Return whether the constructor that Hydra called, which raised the error or called what did, is the user's."""
    called = error.__traceback__ and error.__traceback__.tb_next
    return called is not None and called.tb_frame.f_globals["__name__"].partition(".")[0] not in _LIBRARIES
