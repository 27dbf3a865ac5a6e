"""How ranks write a checkpoint together: which rank writes a tensor, its copy in host memory, the thread, the steps."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightswitch.checkpoints.shards import Piece, Stored, local
from lightswitch.errors import LostRank, UnwrittenCheckpoint

log = logging.getLogger(__name__)

Action = Callable[[], None]
CHUNK_BYTES = 64 * 2**20
_ALIGNED_BYTES = 64  # a cache line, and a multiple of every dtype's size
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.001, 0.05
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


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
        has_lost_a_rank: whether the last write failed with LostRank, so that its process group is no longer usable.
    """

    def __init__(self) -> None:
        self._last: Thread | None = None  # the last thread queued; each waits for the one before it
        self.is_good = True
        self.has_lost_a_rank = False
        self._failure: Exception | None = None
        self._pools = {is_pinned: Pool(is_pinned) for is_pinned in (False, True)}

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies on the CPU, in memory that the next checkpoint reuses. Of a DTensor, copy the local tensor.

        Training waits for this, and for the previous write, which must be complete before the call.
        """
        for pool in self._pools.values():
            pool.reuse()
        largest_first = sorted(tensors.items(), key=lambda item: -local(item[1]).nbytes)
        staged = {name: self._copy(tensor) for name, tensor in largest_first}
        for device in {tensor.device for tensor in map(local, tensors.values()) if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # the copies are asynchronous
        return staged

    def write(self, write: Action) -> None:
        """Queue a write; its error is stored for `failure`."""

        def attempt() -> None:
            try:
                write()
                self.is_good, self.has_lost_a_rank = True, False
            except Exception as error:  # the disk, a lost rank, or a bug, which this thread would otherwise swallow
                self.is_good, self._failure = False, error
                self.has_lost_a_rank = isinstance(error, LostRank)

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

    def _copy(self, tensor: Stored) -> Stored:
        if isinstance(tensor, Piece):
            return tensor.with_values(self._copied(tensor.values))
        if not is_traceable_wrapper_subclass(tensor):
            return self._copied(tensor)

        def copied(_: str, inner: Any) -> Any:
            return self._copied(inner) if isinstance(inner, Tensor) else inner  # for example, a mesh

        whole: Tensor = transform_subclass(tensor, copied)
        return whole

    def _copied(self, part: Tensor) -> Tensor:
        kept = self._pools[part.is_cuda].empty(part.shape, part.dtype)
        return kept.copy_(part.detach(), non_blocking=part.is_cuda)


class Pool:
    """CPU memory in chunks that are reused for each checkpoint.

    torch rounds a pinned block up to a power of two, so that one block for each tensor would take up to twice the
    bytes. Here a chunk is a power of two from the start, and several tensors share it; if a tensor needs a chunk larger
    than `CHUNK_BYTES`, the next tensors use the rest of it. Allocated in order of size, the largest first, tensors
    leave about one chunk unused.

    Args:
        is_pinned: whether the memory is pinned, so that a GPU copies to it while it computes.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._chunks: list[Tensor] = []
        self._used_bytes: list[int] = []  # of each chunk

    @property
    def bytes(self) -> int:
        """Size of all chunks in bytes."""
        return sum(chunk.numel() for chunk in self._chunks)

    def reuse(self) -> None:
        """Free all tensors at once; they must not be used any more."""
        self._used_bytes = [0] * len(self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        needed_bytes = math.prod(shape) * dtype.itemsize
        number = self._chunk_with(needed_bytes)
        begin = self._used_bytes[number]
        self._used_bytes[number] += -(-needed_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._chunks[number][begin : begin + needed_bytes].view(dtype).view(tuple(shape))

    def _chunk_with(self, needed_bytes: int) -> int:
        for number, (chunk, used_bytes) in enumerate(zip(self._chunks, self._used_bytes, strict=True)):
            if used_bytes + needed_bytes <= chunk.numel():
                return number
        self._chunks.append(self._chunk(max(CHUNK_BYTES, 1 << (needed_bytes - 1).bit_length())))
        self._used_bytes.append(0)
        return len(self._chunks) - 1

    def _chunk(self, bytes: int) -> Tensor:
        try:
            return torch.empty(bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        except RuntimeError as error:
            if not self._is_pinned:
                raise
            self._is_pinned = False
            first = str(error).partition("\n")[0]
            log.warning("saves      to unpinned memory, which makes training wait longer: %s", first)
            return self._chunk(bytes)


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
            self._store.set(self._key(str(self.rank)), json.dumps(action()))
            if self._store.add(self._key("arrived"), 1) == self.world_size:
                self._decide({})
        except Exception as error:
            is_of_disk = isinstance(error, OSError)  # else a bug, which the other ranks have to raise as well
            cause = None if is_of_disk else error
            message = first_line(error) if is_of_disk else f"{type(error).__name__}: {error}"
            told = message if isinstance(error, CollectiveError) else f"rank {self.rank}: {message}"
            self._decide({"lost": not is_of_disk, "told": told})
        self._conclude(what, cause)

    def results(self, ranks: Iterable[int]) -> list[Any]:
        """Return the results of the last step's action on the given ranks, in their order."""
        return [json.loads(one) for one in self._store.multi_get([self._key(str(r), self._done - 1) for r in ranks])]

    def fail(self, cause: str) -> None:
        """Fail the next step on all ranks, as this rank will not take it while others may be waiting."""
        with contextlib.suppress(dist.DistError):  # rank 0, which serves the store, is dead
            self._decide({"lost": True, "told": f"rank {self.rank} failed: {cause}"})

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
        if self._done > 1:  # all ranks have completed the step before
            for name in (str(self.rank), *(("arrived", "outcome") if self.rank == 0 else ())):
                self._store.delete_key(self._key(name, self._done - 2))

    def _late(self, what: str) -> dict[str, Any]:
        """Return the outcome that names the ranks that have not arrived; empty if all have."""
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        late = [rank for rank in others if not self._store.check([self._key(str(rank))])]
        if not late:
            return {}
        who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        when = "before the run failed" if self._has_lost_a_rank.is_set() else f"in {self._timeout_seconds:g} s"
        return {"lost": True, "told": f"{who} did not {what} {when}"}

    def _wait(self, key: str) -> bool:
        """Wait for a key by polling: a blocking wait would block the store for this process's other threads."""
        end, pause = time.monotonic() + self._timeout_seconds, _FIRST_POLL_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > end or self._has_lost_a_rank.is_set():
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)
        return True

    def _key(self, name: str, step: int | None = None) -> str:
        return f"{self._done if step is None else step}/{name}"


def together(ranks: Ranks | None, what: str, action: Callable[[], Any], heard: Iterable[int] = ()) -> list[Any]:
    """Run an action on every rank and return its results; if it fails on one rank, it fails on all without a hang.

    Args:
        what: the action, for the message that names a late rank: "write its shard".
        heard: the ranks whose results are returned.
    """
    try:
        if ranks is None:
            return [action()]
        ranks.writing.take(what, action)
    except OSError as error:
        message = describe_failure(error, 0) if ranks is None and not isinstance(error, CollectiveError) else error
        raise UnwrittenCheckpoint(f"the checkpoint could not be written: {message}") from error
    except LostRank as error:
        raise LostRank(f"the checkpoint could not be written: {error}") from error.__cause__
    return ranks.writing.results(heard)


def describe_failure(error: BaseException, rank: int) -> str:
    """Return a short text with the failed rank and its error."""
    return f"rank {rank}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, after a note if the disk is full."""
    first = str(error).partition("\n")[0] or type(error).__name__
    full = _FULL.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{full}: {first}" if full else first
