"""How ranks write a checkpoint together: which rank writes a tensor, its copy in host memory, the thread, the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from lightswitch.checkpoints.shards import Piece, Stored, local, with_local
from lightswitch.collectives import of_ranks_if_short
from lightswitch.errors import LostRank, UnwrittenCheckpoint

log = logging.getLogger(__name__)

Action = Callable[[], None]


def replicas_of(tensor: Stored, rank: int, world_size: int) -> tuple[int, int]:
    """Return the number of replicas of this rank's local tensor, and the index of this rank among them.

    A plain tensor is replicated on all ranks, a DTensor as its mesh says, a Piece not at all.
    """
    if isinstance(tensor, Piece):
        return 1, 0
    if not isinstance(tensor, DTensor):
        return world_size, rank
    count, own, mesh = 1, 0, tensor.device_mesh
    for placement, size, position in zip(tensor.placements, mesh.shape, mesh.get_coordinate() or (), strict=False):
        if placement.is_replicate():
            count, own = count * size, own * size + position
    return count, own


def share(
    tensors: Mapping[str, Stored], replicas: Mapping[str, tuple[int, int]], parameters: Iterable[str]
) -> dict[str, Stored]:
    """Return the tensors that a rank writes, so that each replicated tensor is written once and the load is balanced.

    All ranks reach the same result without communication if they replicate the same tensors. What is in the model and
    is no parameter, as a batch norm's statistics, may differ by rank: the first replica writes it.
    """
    names, own = set(parameters), {}
    loads: dict[int, list[int]] = {}  # elements of each replica so far, by the number of replicas
    for name in sorted(tensors, key=lambda name: (-tensors[name].shape.numel(), name)):
        count, index = replicas[name]
        kind, _, of_kind = name.partition(".")
        of_count = loads.setdefault(count, [0] * count)
        is_of_first = kind in ("model", "trained") and of_kind not in names
        writer = 0 if is_of_first else of_count.index(min(of_count))
        of_count[writer] += tensors[name].shape.numel()
        if count == 1 or index == writer:
            own[name] = tensors[name]
    return own


class Writer:
    """Queue of checkpoint writes in a thread, and of actions that run only if the write before them succeeded.

    Every rank must queue the same writes in the same order.

    Attributes:
        is_good: whether the last write succeeded.
    """

    def __init__(self) -> None:
        self._last: Thread | None = None  # the last thread queued; each waits for the one before it
        self.is_good = True
        self._failure: Exception | None = None
        self._memory: dict[str, Tensor] = {}  # copies, by name; the next checkpoint reuses their memory

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies on the CPU, in memory that the next checkpoint reuses. Of a DTensor, copy the local tensor.

        Training waits for this, and for the previous write, which must be complete before the call.
        """
        staged = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in map(local, tensors.values()) if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # the copies are asynchronous
        return staged

    def write(self, write: Action) -> None:
        """Queue a write; its error is stored for `failure`."""

        def attempt() -> None:
            try:
                write()
                self.is_good = True
            except Exception as error:  # the disk, a lost rank, or a bug, which this thread would otherwise swallow
                self.is_good, self._failure = False, error

        self._start(attempt)

    def then(self, action: Action) -> None:
        """Queue an action to run after the last write; it is skipped if that write failed."""

        def attempt() -> None:
            try:
                if self.is_good:
                    action()
            except OSError as error:
                self._failure = error

        self._start(attempt)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the queue is empty, and return False if that takes longer than the timeout."""
        if self._last is not None:
            self._last.join(timeout_seconds)
        return self._last is None or not self._last.is_alive()

    @property
    def has_lost_rank(self) -> bool:
        """Whether `failure` returns a lost rank next."""
        return isinstance(self._failure, LostRank)

    def failure(self) -> Exception | None:
        """Return the error of a failed write or action, and clear it; None if none failed since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def _start(self, action: Action) -> None:
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            action()

        self._last = Thread(target=run, name="checkpoint", daemon=True)
        self._last.start()

    def _copy(self, name: str, tensor: Stored) -> Stored:
        part = local(tensor).detach()
        memory = self._memory.get(name)
        if memory is None or (memory.shape, memory.dtype) != (part.shape, part.dtype):
            with torch.inference_mode(False):  # a test may save first, and a fit uses the same memory
                memory = self._memory[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        return with_local(tensor, memory.copy_(part, non_blocking=part.is_cuda))


class Ranks:
    """Process groups of a run's ranks: one to prepare saves and to read, one for the thread that writes.

    They are of gloo, as NCCL sends no Python objects. The constructor is collective.

    Args:
        timeout_seconds: how long to wait for a rank in each step of a save.
    """

    def __init__(self, timeout_seconds: float) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.staging, self.writing = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))


@dataclass(frozen=True)
class Outcome:
    """Result of an action, or the rank and text of its error; an object that ranks can send."""

    result: Any = None
    problem: str | None = None


def together(
    group: dist.ProcessGroup | None,
    what: str,
    action: Callable[[], Any],
    conclude: Callable[[list[Any]], Any] = lambda results: None,
) -> Any:
    """Run an action on every rank, then another one on rank 0, and return on all ranks what that returns.

    Args:
        group: the ranks; None for a single process.
        what: the action, for the message that names a late rank: "write its shard".
        action: returns a value that can be pickled.
        conclude: takes the results of all ranks, in their order.

    Raises:
        UnwrittenCheckpoint: on every rank, if an action fails on one of them.
        LostRank: a rank has ended, or did not arrive in time.
    """
    own, cause = _attempt(action, 0 if group is None else dist.get_rank(group))

    def decide(outcomes: list[Outcome]) -> Outcome:
        nonlocal cause
        if failed := next((one for one in outcomes if one.problem), None):
            return failed
        outcome, cause = _attempt(lambda: conclude([one.result for one in outcomes]), 0)
        return outcome

    outcome = decide([own]) if group is None else _exchange(group, what, own, decide)
    if outcome.problem:
        raise UnwrittenCheckpoint(f"the checkpoint could not be written: {outcome.problem}") from cause
    return outcome.result


def _attempt(action: Callable[[], Any], rank: int) -> tuple[Outcome, Exception | None]:
    try:
        return Outcome(action()), None
    except Exception as error:  # the disk, or a bug: the other ranks wait for this one either way
        return Outcome(problem=f"rank {rank}: {why(error)}"), error


def _exchange(group: dist.ProcessGroup, what: str, own: Outcome, decide: Callable[[list[Outcome]], Outcome]) -> Outcome:
    """Send the outcome of each rank to rank 0, and what it decides to all."""
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    arrived = [f"{group.group_name}/{one} has arrived" for one in ranks]  # in the store: gloo's errors name no rank
    try:
        _get_default_store().set(arrived[rank], "")
        if (outcomes := of_ranks_if_short(own, group)) is None:
            outcomes = [own for _ in ranks]
            dist.gather_object(own, outcomes if rank == 0 else None, dst=0, group=group)
        verdict = [decide(outcomes) if rank == 0 else own]
        dist.broadcast_object_list(verdict, src=0, group=group)  # which waits for rank 0 alone
        _get_default_store().delete_key(arrived[rank])
    except RuntimeError as error:
        late = [str(one) for one in ranks if not _has(arrived[one])] or ["0"]  # all wait for what rank 0 decides
        who = f"rank{'s' * (len(late) > 1)} {', '.join(late)}"
        raise LostRank(f"the checkpoint could not be written: {who} did not {what}") from error
    return verdict[0]


def _has(key: str) -> bool:
    try:
        return _get_default_store().check([key])
    except dist.DistError:  # rank 0, which serves the store, has ended
        return "/0 " not in key


def why(error: BaseException) -> str:
    """Return an error's text as one line."""
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error).partition("\n")[0] or type(error).__name__
