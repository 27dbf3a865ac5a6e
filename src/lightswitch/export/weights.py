"""Weights of a model in a checkpoint, read in one process whatever wrote them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightswitch.checkpoints.reader import OnRead, Reader, unreadable

_PREFIX = "model."


class Weights:
    """Weights of one checkpoint, whose checksums are compared at once and whose tensors are read later.

    Attributes:
        state: all of the checkpoint but tensors.
        extra_state: what modules keep that is not a tensor, by name.
        names_of_tied: first names of tied tensors by their others; None in checkpoints of an earlier version.
        like: tensors by name on the meta device, shapes and dtypes without values.

    Raises:
        UnfitCheckpoint: it can't be read, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._reader = Reader(path, group=None)
        self.state = self._reader.state
        self.extra_state = self._mapping("extra_state")
        self.names_of_tied = self._mapping("names_of_tied") if "names_of_tied" in self.state else None
        names = sorted(self._reader.names(_PREFIX))
        self.like = {name: self._reader.like[_PREFIX + name] for name in names}  # without values: shapes and dtypes

    def read(
        self, names: Iterable[str], dtype: torch.dtype | None = None, on_read: OnRead | None = None
    ) -> dict[str, Tensor]:
        """Return tensors on the CPU, by name.

        Args:
            dtype: what floating-point tensors are rounded to, one by one as they are read; None for their own.
            on_read: called with the number of bytes that were just read.
        """
        tensors = {
            name: torch.empty_like(self.like[name], dtype=self.dtype(name, dtype), device="cpu") for name in names
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads, as meant
            self._reader.fill({_PREFIX + name: tensor for name, tensor in tensors.items()}, on_read)
        return tensors

    def _mapping(self, key: str) -> dict[str, Any]:
        found = self.state.get(key, {})
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise unreadable(self._reader.path, f"{key} is damaged")
        return found

    def dtype(self, name: str, asked: torch.dtype | None) -> torch.dtype:
        """Return the dtype of a tensor once it is rounded to the one that is asked for; integers keep theirs."""
        saved = self.like[name].dtype
        return asked if asked is not None and saved.is_floating_point else saved
