"""Agreement between the ranks that write a checkpoint together: no rank hangs, and all receive a failure."""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from threading import Event
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from lightswitch.errors import LostRank

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.001, 0.05
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


class CollectiveError(OSError):
    """Error that every rank raises, whose text names the rank it comes from."""


class Ranks:
    """Ranks of a run that save checkpoints together, in the training thread and in the writer thread.

    The constructor is collective.

    Args:
        timeout_seconds: how long to wait for a rank in each step of a save.
        has_lost_a_rank: set once a rank is known to be dead or to hang, and no step waits any longer.
    """

    def __init__(self, timeout_seconds: float, has_lost_a_rank: Event) -> None:
        # gloo, as NCCL sends no Python objects; a separate group, as training uses the other one at the same time
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.staging = Steps(self.group, "staging", timeout_seconds, has_lost_a_rank)
        self.writing = Steps(self.group, "writing", timeout_seconds, has_lost_a_rank)


class Steps:
    """Sequence of steps that all ranks take, each with the same outcome on all ranks and within a timeout.

    The ranks agree through the process group's store, not by collectives: the store responds while a rank hangs, and
    shows which one does.

    Args:
        group: the process group of the ranks.
        name: the name of the sequence; two sequences may run at the same time.
        timeout_seconds: how long to wait for a rank in a step.
        has_lost_a_rank: see `Ranks`.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, timeout_seconds: float, has_lost_a_rank: Event) -> None:
        self._store = PrefixStore(f"{group.group_name}/{name}", _get_default_store())
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_seconds, self._has_lost_a_rank = timeout_seconds, has_lost_a_rank
        self._done = 0

    def take(self, what: str, action: Callable[[], Any]) -> None:
        """Run an action as the next step, and wait until all ranks have run theirs.

        Args:
            what: the step, for the message that names a rank which did not take it: "write its shard".
            action: returns a value that can be written as JSON.

        Raises:
            OSError: on every rank, if the action raised OSError on one of them.
            LostRank: on every rank, if the action raised another error on one, or a rank did not arrive in time.
        """
        cause: BaseException | None = None
        try:
            self._arrive(action())
        except OSError as error:
            self._decide(self._failed(error, lost=False))
        except Exception as error:  # a bug, which the other ranks have to raise as well
            cause = error
            self._decide(self._failed(error, lost=True))
        self._conclude(what, cause)

    def results(self, ranks: Iterable[int]) -> list[Any]:
        """Return the results of the last step's action on the given ranks, in their order."""
        return [json.loads(one) for one in self._store.multi_get([self._key(str(r), self._done - 1) for r in ranks])]

    def fail(self, cause: str) -> None:
        """Fail the next step on all ranks, as this rank will not take it while others may be waiting."""
        with contextlib.suppress(dist.DistError):  # rank 0, which serves the store, is dead
            self._decide({"lost": True, "told": f"rank {self.rank} failed: {cause}"})

    def _arrive(self, result: Any) -> None:
        self._store.set(self._key(str(self.rank)), json.dumps(result))
        if self._store.add(self._key("arrived"), 1) == self.world_size:
            self._decide({})

    def _decide(self, outcome: dict[str, Any]) -> None:
        """Set the outcome of the step, unless another rank has already set it."""
        self._store.compare_set(self._key("outcome"), "", json.dumps(outcome))

    def _conclude(self, what: str, cause: BaseException | None) -> None:
        if not self._wait(self._key("outcome")):
            self._decide(self._late(what))
        outcome = json.loads(self._store.get(self._key("outcome")))
        self._done += 1
        if outcome:
            raise (LostRank if outcome["lost"] else OSError)(outcome["told"]) from cause
        self._forget(self._done - 2)

    def _late(self, what: str) -> dict[str, Any]:
        """Return the outcome that names the ranks that have not arrived; empty if all have."""
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        late = [rank for rank in others if not self._store.check([self._key(str(rank))])]
        if not late:
            return {}
        who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        when = "before the run failed" if self._has_lost_a_rank.is_set() else f"in {self._timeout_seconds:g} s"
        return {"lost": True, "told": f"{who} did not {what} {when}"}

    def _failed(self, error: BaseException, lost: bool) -> dict[str, Any]:
        message = first_line(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return {"lost": lost, "told": message if isinstance(error, CollectiveError) else f"rank {self.rank}: {message}"}

    def _wait(self, key: str) -> bool:
        """Wait for a key by polling: a blocking wait would block the store for this process's other threads."""
        end, pause = time.monotonic() + self._timeout_seconds, _FIRST_POLL_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > end or self._has_lost_a_rank.is_set():
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)
        return True

    def _forget(self, step: int) -> None:
        """Delete the keys of a step that all ranks have completed."""
        names = [str(self.rank), *(["arrived", "outcome"] if self.rank == 0 else [])]
        for name in names if step >= 0 else ():
            self._store.delete_key(self._key(name, step))

    def _key(self, name: str, step: int | None = None) -> str:
        return f"{self._done if step is None else step}/{name}"


def describe_failure(error: BaseException, rank: int) -> str:
    """Return a short text with the failed rank and its error."""
    return f"rank {rank}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, after a note if the disk is full."""
    first = str(error).partition("\n")[0] or type(error).__name__
    full = _FULL.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{full}: {first}" if full else first
