"""Reads of sharded weights by one rank alone, which would hang or crash: refused in the first calls of a hook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from lightswitch.errors import Refused

_FIRST_CALLS = 3  # of each hook, in which ranks wait for each other
_MOST_RANKS = 64  # each of them asks for the answers of all others


class LoneReads:
    """Comparison, through the rendezvous store, of whether ranks read sharded weights in a hook.

    Args:
        key: prefix of keys in the store, equal on all ranks.
        timeout: how long to wait for a rank.
    """

    def __init__(self, key: str, timeout: timedelta) -> None:
        self._store, self._timeout = PrefixStore(f"reads/{key}", _get_default_store()), timeout
        self._calls = Counter[str]()
        self._exchanges = 0

    def checked(self, hook: str) -> Callable[[bool], None] | None:
        """Return what a rank has to call before each read in this call of a hook, and with False at its end; or None.

        It raises `Refused` if another rank has ended the hook, or is in another one.
        """
        self._calls[hook] += 1
        is_due = self._calls[hook] <= _FIRST_CALLS and 1 < dist.get_world_size() <= _MOST_RANKS
        return partial(self._compare, hook) if is_due and dist.get_backend() != "fake" else None  # a planned step's

    def _compare(self, hook: str, reads: bool) -> None:
        rank, own = dist.get_rank(), f"{hook}: {reads}"
        self._exchanges += 1
        self._store.set(f"{self._exchanges}/{rank}", own)
        self._store.delete_key(f"{self._exchanges - 2}/{rank}")  # no rank is that far behind
        for other in range(dist.get_world_size()):
            key = f"{self._exchanges}/{other}"
            self._store.wait([key], self._timeout)
            if self._store.get(key).decode() != own:
                alone, without = (rank, other) if reads else (other, rank)
                raise Refused(
                    f"{hook} reads a weight on rank {alone} but not on rank {without}, and fsdp has a shard on each; "
                    "read it on all ranks, or use strategy=ddp"
                )
