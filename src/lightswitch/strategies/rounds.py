"""Rounds in which ranks tell each other what they read of sharded weights: a rank that reads alone would hang.

A file of its own, because fsdp and DeepSpeed both import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from lightswitch.errors import Refused

FIRST = 3  # calls of a hook in which ranks wait for each other
LATER_SECONDS = 60.0  # how long, in later calls, a rank waits for others to do as it does
MOST_ASKED = 64  # ranks that tell each other what they read: each of them asks for the answers of all others


class Rounds:
    """Exchanges, within a hook, of the names of the weights that ranks touch, through the rendezvous store.

    Args:
        key: prefix of keys in the store, equal on all ranks.
        timeout_seconds: how long to wait for a rank that is in the same hook.
        sharded_by: what has a shard on each rank, for messages.
        instead: strategy under which a rank may read alone.
    """

    def __init__(self, key: str, timeout_seconds: float, sharded_by: str, instead: str) -> None:
        self.timeout_seconds = timeout_seconds
        self._sharded_by, self._instead = sharded_by, instead
        self._store = PrefixStore(f"writes/{key}", _get_default_store())
        self._round = 0
        self._calls: dict[str, list[str | None]] = {}  # parts called in the last batch of a step, None at its end

    def agree(self, hook: str, wanted: str | None, seconds: float) -> Mapping[int, str | None]:
        """Return the names of the weights that ranks want to touch in a hook, by rank; None after its hook has ended.

        Args:
            wanted: name that this rank wants; None after its hook has ended.
            seconds: how long to wait for each other rank.

        Raises:
            Refused: another rank is in another hook, or did not answer in time.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1 or dist.get_backend() == "fake":  # a planned step's
            return {rank: wanted}
        self._round += 1
        self._store.set(f"{self._round}/{rank}", json.dumps([hook, wanted]))
        self._store.delete_key(f"{self._round - 2}/{rank}")  # no rank is that far behind
        found: dict[int, str | None] = {}
        for other in range(world_size):
            key = f"{self._round}/{other}"
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except Exception as error:  # torch's exception classes differ by version
                raise self._refusal(hook, wanted, rank, other) from error
            its_hook, found[other] = json.loads(self._store.get(key))
            if its_hook != hook:
                raise self._refusal(hook, wanted, rank, other)
        return found

    def together(self, hook: str, wanted: str | None) -> None:
        """Check that all ranks read in a hook, or that all have ended it, before they go on.

        Raises:
            Refused: a rank reads that another does not read.
        """
        found = self.agree(hook, wanted, self.timeout_seconds)
        reading = [rank for rank, name in found.items() if name is not None]
        others = [rank for rank, name in found.items() if name is None]
        if reading and others:
            raise self._refusal(hook, found[reading[0]], reading[0], others[0])

    @contextmanager
    def in_evaluation(self, step: str, trainer: Trainer, parts: Mapping[str, nn.Module]) -> Iterator[None]:
        """Context of an evaluation step, in which all ranks have to call the same parts in the same order.

        A rank asks the others only from where its calls are not those of the batch before, which were the same on all
        ranks: it waits there, so that no collective of one part meets that of another.

        Args:
            parts: modules that gather their parameters before a forward pass, by name.

        Raises:
            Refused: the ranks call different parts, or one of them more often.
        """
        is_hook_of_fit = getattr(trainer._active_loop, "batch_progress", None) is None
        is_compiled = any(getattr(part, "_compiled_call_impl", None) is not None for part in parts.values())
        if is_hook_of_fit or trainer.world_size > MOST_ASKED or is_compiled:
            yield
            return
        calls: list[str | None] = []
        before = iter(self._calls.get(step, []))

        def call(part: str | None, *_: Any) -> None:
            nonlocal before
            expected = next(before, "")
            if part != expected:
                before = iter(())
                self._compare(step, part, expected)
            calls.append(part)

        hooks = [
            part.register_forward_pre_hook(partial(call, name or "the module"), prepend=True)
            for name, part in parts.items()
        ]
        yield  # no try/finally: an error ends the run
        for hook in hooks:
            hook.remove()
        call(None)
        self._calls[step] = calls

    def _compare(self, step: str, part: str | None, expected: str | None) -> None:
        """Compare what ranks call next; `expected` is "" where all are about to compare."""
        seconds = min(LATER_SECONDS, self.timeout_seconds) if step in self._calls else self.timeout_seconds
        try:
            found = {f"rank {rank}": name for rank, name in self.agree(step, part, seconds).items()}
        except Refused:
            if expected == "":
                raise
            found = {f"rank {dist.get_rank()}": part, "another rank": expected}
        calls = {name: rank for rank, name in found.items() if name is not None}
        if calls and len({*found.values()}) > 1:
            name, rank = next(iter(calls.items()))
            other = next(other for other, its in found.items() if its != name)
            raise Refused(
                f"{step} calls {name} on {rank} when {other} does not, and {self._sharded_by} has a shard of it on "
                "each: ranks run another number of forward passes, as if each generates until an end in its own "
                f"samples; run as many on all ranks, or use strategy={self._instead}"
            )

    def _refusal(self, hook: str, wanted: str | None, rank: int, other: int) -> Refused:
        return Refused(
            f"{hook} accesses {wanted or 'weights'} on rank {rank} but not on rank {other}, and {self._sharded_by} has "
            f"a shard on each; access it on all ranks, or use strategy={self._instead}"
        )
