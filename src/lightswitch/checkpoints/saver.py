"""Checkpoints written beside training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightswitch.checkpoints.local import local
from lightswitch.checkpoints.piece import Piece, Stored
from lightswitch.checkpoints.pool import Pool
from lightswitch.errors import LostRank

Action = Callable[[], None]


class Saver:
    """Thread that writes one checkpoint after the other, and runs what follows a write only if it succeeded.

    Every rank must ask for the same writes in the same order.

    Attributes:
        is_good: the last write succeeded.
        has_lost_a_rank: the last write failed on another rank, and its process group can't be used any more.
    """

    def __init__(self) -> None:
        self._last: Thread | None = None  # the last queued; each waits for the one before
        self.is_good = True
        self.has_lost_a_rank = False  # in the last write: the process group can't be used any more
        self._failure: Exception | None = None
        self._pools = {is_pinned: Pool(is_pinned) for is_pinned in (False, True)}

    @property
    def staging_bytes(self) -> int:
        """Memory that is kept for what is staged."""
        return sum(pool.bytes for pool in self._pools.values())

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies on the CPU, of a DTensor its local part, in memory that is kept for the next checkpoint.

        This is what training waits for, beside the end of the write before, which must be over.
        """
        for pool in self._pools.values():
            pool.reuse()
        largest_first = sorted(tensors.items(), key=lambda item: -local(item[1]).nbytes)
        staged = {name: self._copy(tensor) for name, tensor in largest_first}
        for device in {tensor.device for tensor in map(local, tensors.values()) if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # until then, the copies are under way
        return staged

    def write(self, write: Action) -> None:
        """Queue a write; its error is kept for `failure`."""

        def attempt() -> None:
            try:
                write()
                self.is_good, self.has_lost_a_rank = True, False
            except Exception as error:  # the disk, a lost rank, or a bug, which would end with this thread
                self.is_good, self._failure = False, error
                self.has_lost_a_rank = isinstance(error, LostRank)

        self._start(attempt)

    def then(self, action: Action) -> None:
        """Queue an action for after the last write; it is skipped if that failed."""

        def attempt() -> None:
            try:
                if self.is_good:
                    action()
            except OSError as error:
                self._failure = error

        self._start(attempt)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written, and return whether that came in time."""
        if self._last is not None:
            self._last.join(timeout_seconds)
        return self._last is None or not self._last.is_alive()

    def failure(self) -> Exception | None:
        """Return why a write failed, once; None if none did since the last call."""
        told, self._failure = self._failure, None
        return told

    def _start(self, action: Action) -> None:
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            action()

        self._last = Thread(target=run, name="checkpoint", daemon=True)
        self._last.start()

    def _copy(self, tensor: Stored) -> Stored:
        if isinstance(tensor, Piece):
            return tensor.with_values(self._copied(tensor.values))
        if not is_traceable_wrapper_subclass(tensor):
            return self._copied(tensor)

        def copied(_: str, inner: Any) -> Any:
            return self._copied(inner) if isinstance(inner, Tensor) else inner  # a mesh, for one

        whole: Tensor = transform_subclass(tensor, copied)
        return whole

    def _copied(self, part: Tensor) -> Tensor:
        kept = self._pools[part.is_cuda].empty(part.shape, part.dtype)
        return kept.copy_(part.detach(), non_blocking=part.is_cuda)
