"""The batch size that a run's data have themselves: what a step takes where no global_batch_size is given."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from lightswitch.config import aliases
from lightswitch.preflight.targets import parameters

_GLOBAL = "global_batch_size"


class OwnBatch(NamedTuple):
    """A batch size, and the key that has it: `data.batch_size`."""

    key: str
    size: int


def of(cfg: DictConfig) -> OwnBatch | None:
    """Return the batch size of a config's data, or of the model where that has the loaders: as the config has it, else
    the default of its constructor; None where there is none, or where its dataset deals out samples itself."""
    node = next((key for key in ("data", "model") if key in cfg and cfg._get_node(key)), None)
    if node is None or not isinstance(cfg[node], DictConfig) or cfg[node].get("sharded_by") == "dataset":
        return None
    raw: Any = OmegaConf.to_container(cfg[node], resolve=False)
    defaults = parameters(str(raw.get("_target_")))
    for name in aliases.names(_GLOBAL):
        if name in raw:
            size = None if _GLOBAL in str(raw[name]) else cfg[node][name]  # it may follow the global batch
        elif name in defaults:
            size = _number(defaults[name].default)
        else:
            continue
        if type(size) is int and size > 0:
            return OwnBatch(f"{node}.{name}", size)
    return None


def _number(default: str | None) -> int | None:
    return int(default) if default is not None and default.isdecimal() else None
