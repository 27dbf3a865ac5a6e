"""How the memory of a device changes in a step, and its peak: arithmetic alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

Kind = Literal[
    "parameters", "gradients", "optimizer", "buffers", "gathered", "communication", "activations", "temporary"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Change:
    """A change of the memory in use: bytes that are taken or, if negative, given back.

    Attributes:
        phase: of the step: forward, backward or optimizer.
        where: path of the module at work.
    """

    kind: Kind
    bytes: float
    phase: str
    where: str


@dataclass(frozen=True)
class Peak:
    """The most that a device holds at once, and when that is.

    Attributes:
        by_kind: bytes, which add up to ``bytes``.
        phase, where: see `Change`.
    """

    bytes: float
    by_kind: Mapping[Kind, float]
    phase: str
    where: str

    def extrapolated(self, other: Peak, weight: float) -> Timeline:
        """Return a step that has this peak at a weight of 0 and the other at 1, kind by kind, and nothing else."""
        held = {
            kind: max(0.0, self.by_kind.get(kind, 0.0) * (1 - weight) + other.by_kind.get(kind, 0.0) * weight)
            for kind in KINDS
        }
        largest = max(KINDS, key=held.__getitem__)
        last = Change(largest, held.pop(largest), self.phase, self.where)
        return Timeline(held, (last,))


@dataclass(frozen=True)
class Timeline:
    """Bytes that are held when a step starts, and how they change until it ends."""

    before: Mapping[Kind, float]  # bytes
    changes: tuple[Change, ...]

    def held(self) -> list[float]:
        """Return the bytes that are held at the start and after each change."""
        return list(accumulate((change.bytes for change in self.changes), initial=sum(self.before.values())))

    def peak(self) -> Peak:
        """Return the first of the moments at which most is held."""
        held = self.held()
        at = max(range(len(held)), key=held.__getitem__)
        by_kind: dict[Kind, float] = defaultdict(float, self.before)
        for change in self.changes[:at]:
            by_kind[change.kind] += change.bytes
        last = self.changes[at - 1] if at else None
        shown = {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}
        return Peak(held[at], shown, last.phase if last else "", last.where if last else "")

    def accumulating(self) -> Timeline:
        """Return the step as if another micro batch had come before it, to whose gradients it adds its own.

        A gradient is freed once it is added, which is when the next one is made.
        """
        changes, pending = [], 0.0
        for change in self.changes:
            if change.kind != "gradients":
                changes.append(change)
                continue
            made = max(0.0, change.bytes)
            changes.append(replace(change, bytes=made - pending if made else 0.0))
            pending = made or pending
        return Timeline(self.before, tuple(changes))


@dataclass(frozen=True)
class Growth:
    """A step at two sizes of its micro batch, from which it is extrapolated to any other.

    The bytes of each storage are affine in the samples. Those of the peak are not, as it may move to another moment; so
    storages are extrapolated, and the peak is found anew. A step that takes another path at another size, as one whose
    loss is computed in chunks, has no storages that correspond: there the two peaks are extrapolated, kind by kind.

    Attributes:
        samples: the two sizes.
        steps: the step at each.
    """

    samples: tuple[int, int]
    steps: tuple[Timeline, Timeline]

    @property
    def is_known(self) -> bool:
        """Whether the two sizes differ."""
        return self.samples[0] != self.samples[1]

    def at(self, samples: int) -> Timeline:
        """Return the step at a micro batch of so many samples; the first of the two, where growth is not known."""
        one, other = self.steps
        if samples == self.samples[0] or not self.is_known:
            return one
        weight = self._weight(samples)
        if not self._is_one_path:
            return self._peaks[0].extrapolated(self._peaks[1], weight)
        changes = tuple(
            replace(a, bytes=a.bytes + weight * (b.bytes - a.bytes))
            for a, b in zip(one.changes, other.changes, strict=True)
        )
        before = {kind: bytes + weight * (other.before.get(kind, 0) - bytes) for kind, bytes in one.before.items()}
        return Timeline(before, changes)

    def accumulating(self) -> Growth:
        """Return the growth of a step that accumulates several such micro batches; see `Timeline.accumulating`."""
        one, other = self.steps
        return Growth(self.samples, (one.accumulating(), other.accumulating()))

    def peak_bytes(self, samples: int) -> float:
        """Return the bytes of `at(samples).peak()`, in less time."""
        weight = self._weight(samples)
        return max(a + weight * (b - a) for a, b in self._held)

    def _weight(self, samples: int) -> float:
        return (samples - self.samples[0]) / (self.samples[1] - self.samples[0])

    @cached_property
    def _is_one_path(self) -> bool:
        one, other = self.steps
        return [change.kind for change in one.changes] == [change.kind for change in other.changes]

    @cached_property
    def _peaks(self) -> tuple[Peak, Peak]:
        return self.steps[0].peak(), self.steps[1].peak()

    @cached_property
    def _held(self) -> list[tuple[float, float]]:
        """Pairs of the bytes that both steps hold after each change, each pair once; of two paths, at their peaks."""
        if not self._is_one_path:
            return [(self._peaks[0].bytes, self._peaks[1].bytes)]
        return sorted(set(zip(*(step.held() for step in self.steps), strict=True)))
