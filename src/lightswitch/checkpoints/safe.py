"""State in types that `torch.load(weights_only=True)` reads: a checkpoint from elsewhere runs no code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)

_KEPT = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)
_left_out: set[str] = set()


def safe(value: Any, path: str = "") -> Any:
    """``value`` in plain types; what has none is left out of its container, and the log names it once."""
    kept, plain = _plain(value, path)
    return plain if kept else None


def _plain(value: Any, path: str) -> tuple[bool, Any]:
    if isinstance(value, torch.Tensor):
        return True, value.detach().cpu().clone()  # it may change while it is being written
    if value is None or type(value) in _KEPT:
        return True, value
    if isinstance(value, Mapping):
        parts = {key: _plain(item, f"{path}.{key}") for key, item in value.items() if _plain(key, path)[0]}
        return True, {key: plain for key, (kept, plain) in parts.items() if kept}
    if isinstance(value, list | tuple | set):
        items = [_plain(item, f"{path}.{index}") for index, item in enumerate(value)]
        kind = type(value) if type(value) in (list, tuple, set) else list
        return True, kind(plain for kept, plain in items if kept)
    for known, converted in (
        (np.generic, lambda: value.item()),
        (np.ndarray, lambda: torch.from_numpy(value)),
        (Enum, lambda: value.value),
        (PurePath, lambda: str(value)),
        ((bool, int, float, str), lambda: next(kind(value) for kind in (int, float, str) if isinstance(value, kind))),
    ):
        if isinstance(value, known):
            return True, converted()
    if path not in _left_out:
        _left_out.add(path)
        _tell(path, value)
    return False, None


@rank_zero_only
def _tell(path: str, value: Any) -> None:
    log.warning("checkpoints leave out %s: a %s can't be read back safely", path.lstrip("."), type(value).__name__)
