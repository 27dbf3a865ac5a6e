"""The batch size in the config of a run's data: the default of global_batch_size."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from lightswitch.config import aliases
from lightswitch.preflight.targets import parameters

_GLOBAL = "global_batch_size"


class OwnBatch(NamedTuple):
    """A batch size, and the config key that sets it, such as `data.batch_size`."""

    key: str
    size: int


def of(cfg: DictConfig) -> OwnBatch | None:
    """Return the batch size of the data, or of a model that has the loaders itself.

    The config's value comes first, then the default of the constructor, once torch is imported: a mistyped key is
    answered before. Return None if there is neither, or if the dataset splits its samples by ranks itself.
    """
    node = next((key for key in ("data", "model") if key in cfg and cfg._get_node(key)), None)
    if node is None or not isinstance(cfg[node], DictConfig) or cfg[node].get("sharded_by") == "dataset":
        return None
    raw: Any = OmegaConf.to_container(cfg[node], resolve=False)
    defaults = parameters(str(raw.get("_target_"))) if "torch" in sys.modules else {}
    for name in aliases.names(_GLOBAL):
        if name in raw:
            size = None if _GLOBAL in str(raw[name]) else cfg[node][name]  # it may refer to global_batch_size
        elif name in defaults:
            size = defaults[name].value
        else:
            continue
        if type(size) is int and size > 0:
            return OwnBatch(f"{node}.{name}", size)
    return None
