"""Timeline of a device's memory during a step, and its peak. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

# "update" is what the optimizer's step computes with: it lies where the optimizer's state does
Kind = Literal[
    "parameters", "gradients", "optimizer", "update", "buffers", "gathered", "communication", "activations", "temporary"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Change:
    """A change of the memory in use: bytes that are allocated or, if negative, freed.

    Attributes:
        phase: phase of the step: setup, forward, backward or optimizer.
        where: path of the running module.
    """

    kind: Kind
    bytes: float
    phase: str
    where: str


@dataclass(frozen=True)
class Peak:
    """Peak memory of a device, and the moment when it occurs.

    Attributes:
        by_kind: bytes by kind, which add up to ``bytes``.
        phase, where: see `Change`.
    """

    bytes: float
    by_kind: Mapping[Kind, float]
    phase: str
    where: str

    def extrapolated(self, other: Peak, weight: float) -> Timeline:
        """Return a timeline with only a peak, extrapolated per kind: this peak at weight 0, ``other`` at weight 1."""
        held = {
            kind: max(0.0, self.by_kind.get(kind, 0.0) * (1 - weight) + other.by_kind.get(kind, 0.0) * weight)
            for kind in KINDS
        }
        largest = max(KINDS, key=held.__getitem__)
        last = Change(largest, held.pop(largest), self.phase, self.where)
        return Timeline(held, (last,))


@dataclass(frozen=True)
class Timeline:
    """Bytes in use at the start of a step, and their changes until its end."""

    before: Mapping[Kind, float]  # bytes
    changes: tuple[Change, ...]

    def held(self) -> list[float]:
        """Return the bytes in use at the start and after each change."""
        return list(accumulate((change.bytes for change in self.changes), initial=sum(self.before.values())))

    def peak(self) -> Peak:
        """Return the peak; if it occurs several times, the first occurrence."""
        held = self.held()
        at = max(range(len(held)), key=held.__getitem__)
        by_kind: dict[Kind, float] = defaultdict(float, self.before)
        for change in self.changes[:at]:
            by_kind[change.kind] += change.bytes
        last = self.changes[at - 1] if at else None
        shown = {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}
        return Peak(held[at], shown, last.phase if last else "", last.where if last else "")

    def only(self, kinds: Collection[Kind]) -> Timeline:
        """Return the timeline of these kinds of memory alone."""
        before = {kind: bytes for kind, bytes in self.before.items() if kind in kinds}
        return Timeline(before, tuple(change for change in self.changes if change.kind in kinds))

    def accumulating(self) -> Timeline:
        """Return the step as if it accumulated its gradients onto those of an earlier micro-batch.

        A gradient is freed once it is added, which is when the next one is allocated.
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
    """A step at two micro-batch sizes, from which it is extrapolated to any other size.

    The bytes of each storage are affine in the number of samples. The peak is not, because it may move to another
    moment. So storages are extrapolated, and the peak is computed from them. If a step runs different operations at
    another size, for example because its loss is computed in chunks, storages do not correspond, and the two peaks are
    extrapolated per kind instead.

    Attributes:
        samples: the two micro-batch sizes.
        steps: the step at each size.
    """

    samples: tuple[int, int]
    steps: tuple[Timeline, Timeline]

    @property
    def is_known(self) -> bool:
        """Whether the two sizes differ."""
        return self.samples[0] != self.samples[1]

    def at(self, samples: int) -> Timeline:
        """Return the step at a micro-batch of ``samples`` samples; the first of the two steps if growth is unknown."""
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

    def only(self, kinds: Collection[Kind]) -> Growth:
        """Return the growth of these kinds of memory alone."""
        one, other = self.steps
        return Growth(self.samples, (one.only(kinds), other.only(kinds)))

    def accumulating(self) -> Growth:
        """Return the growth of a step that accumulates gradients over micro-batches; see `Timeline.accumulating`."""
        one, other = self.steps
        return Growth(self.samples, (one.accumulating(), other.accumulating()))

    def peak_bytes(self, samples: int) -> float:
        """Return the bytes of `at(samples).peak()`, but compute them faster."""
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
        """Distinct pairs of the bytes in use in both steps after each change; only the peaks if the paths differ."""
        if not self._is_one_path:
            return [(self._peaks[0].bytes, self._peaks[1].bytes)]
        return sorted(set(zip(*(step.held() for step in self.steps), strict=True)))
