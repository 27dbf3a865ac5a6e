"""Comparison of two runs step by step, which distinguishes differences from rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightswitch.checking import digests
from lightswitch.checking.digests import Digest
from lightswitch.checking.probe import MODEL, OPTIMIZER, START

LOSS = "train/loss"
_ALLOWED = 1e-5  # relative difference that the promise allows, for 32-bit numbers
_ROUNDING = 16  # units in the last place, in the norm of a tensor
_ABOVE_NUDGE = 10  # times the difference of a nudged run: another split sums in another order in each operation
EPS_32 = 2.0**-23


@dataclass(frozen=True)
class State:
    """State before a step, which is the state after the previous step.

    Attributes:
        digests: digests of tensors, by name.
        metrics: logged metrics, by name.
        counted: optimizer steps, as the Trainer counts them.
        unequal: ranks whose copy of a tensor differs, by tensor name.
    """

    digests: Mapping[str, Digest]
    metrics: Mapping[str, float]
    counted: int
    unequal: Mapping[str, list[int]]


States = Mapping[int, State]  # by the number of steps taken before


def states(moments: Iterable[Mapping[str, Any]]) -> dict[int, State]:
    """Return the states before each step and after the last one."""
    return {
        one["step"]: State(one["digests"], one["metrics"], one["counted"], one["unequal"])
        for one in moments
        if one["moment"] == START
    }


@dataclass(frozen=True)
class Difference:
    """First difference between two runs.

    Attributes:
        name: name of a tensor of the module, of a state of an optimizer, or of a metric.
        step: step after which it differs, from 1; 0 for the state at the start.
        relative: norm of the difference divided by the norm of the tensor.
    """

    name: str
    step: int
    relative: float


@dataclass(frozen=True)
class Compared:
    """Comparison of two runs in quantities of one kind.

    Attributes:
        largest: largest relative difference over all steps, of all tensors together or of the metric that differs most.
        first: first difference beyond rounding; None if there is none.
        differing: names of all quantities that differ at that step.
        count: number of compared values.
    """

    largest: float
    first: Difference | None
    differing: tuple[str, ...]
    count: int


class Comparison:
    """Comparison of runs with a reference run of one process.

    A difference counts if it is larger than the effect of rounding. A run whose initial weights are nudged by some
    units in the last place measures that effect. Thus a bias whose gradient is only rounding error, but which Adam
    moves anyway, passes; an average of weights that never moves does not.

    Args:
        one: states of the reference run.
        again: returns the states of an equal start. If it differs, so does the nudged run, which then does not show the
            effect of rounding.
        nudged: returns the states of the nudged run. Neither function is called before something differs.
        parameters: names of the module's parameters; all other tensors of the module are buffers.
        eps: machine epsilon of the dtype that the run computes in.
        is_exact: equal starts are bitwise equal on this device.
    """

    def __init__(
        self,
        one: States,
        again: Callable[[], States],
        nudged: Callable[[], States],
        parameters: Iterable[str],
        eps: float,
        is_exact: bool = True,
    ) -> None:
        self.one, self.is_exact = one, is_exact
        self._equal_start, self._nudge_weights = again, nudged
        self.names = frozenset(parameters)
        self._parameters = {f"{MODEL}{name}" for name in self.names}
        self._eps = eps
        self._start = one[min(one)] if one else State({}, {}, 0, {})

    @cached_property
    def _nudged(self) -> States:
        is_repeated = not self.is_exact or self.again(self._started_again, self.one)[1].first is None
        return self._nudge_weights() if is_repeated else {}

    @cached_property
    def _started_again(self) -> States:
        return self._equal_start()

    @cached_property
    def _unsteady(self) -> set[str]:
        """Names of logged values, such as times, that differ between equal starts whose tensors do not."""
        if self.again(self._started_again, self.one)[1].first is not None:
            return set()
        return {
            name
            for _, here, there in _common(self.one, self._started_again)
            for name, value in here.metrics.items()
            if _apart(value, there.metrics.get(name, value))
        }

    def again(self, other: States, base: States) -> tuple[Compared, Compared]:
        """Compare the losses, and all tensors, of two runs of one way.

        On exact devices, the two are expected to be bitwise equal, so the nudged run is not used.
        """
        rounds = not self.is_exact
        return (
            self._metrics(other, lambda name: name == LOSS, base, rounds),
            self._tensors(other, lambda name: True, base, rounds),
        )

    def parameters(self, other: States, base: States | None = None) -> Compared:
        """Compare parameters with those of another run.

        Args:
            base: states to compare with; None for those of the reference run.
        """
        return self._tensors(other, lambda name: name in self._parameters, base)

    def buffers(self, other: States, base: States | None = None) -> Compared:
        """Compare buffers, persistent or not, and other entries of the module's state."""
        return self._tensors(other, lambda name: name.startswith(MODEL) and name not in self._parameters, base)

    def optimizers(self, other: States, base: States | None = None) -> Compared:
        """Compare the states of optimizers."""
        return self._tensors(other, lambda name: name.startswith(OPTIMIZER), base)

    def all_tensors(self, other: States, base: States | None = None) -> Compared:
        """Compare the states of the module and of its optimizers."""
        return self._tensors(other, lambda name: True, base)

    def loss(self, other: States, base: States | None = None) -> Compared:
        """Compare train/loss."""
        return self._metrics(other, lambda name: name == LOSS, base)

    def logged(self, other: States, base: States | None = None) -> Compared:
        """Compare the other logged values, without those that differ between two equal starts."""
        found = self._metrics(other, lambda name: name != LOSS, base)
        if found.first is None or not self._unsteady:
            return found
        return self._metrics(other, lambda name: name not in {LOSS, *self._unsteady}, base)

    def _tensors(self, other: States, wanted: Any, base: States | None, rounds: bool = True) -> Compared:
        base = self.one if base is None else base
        largest, first, differing, count = 0.0, None, list[Difference](), 0
        for step, here, there in _common(base, other):
            sums: dict[str, list[float]] = {}  # squared norms of differences and of tensors, by kind
            found = []
            for name in (name for name in here.digests if wanted(name) and name in there.digests):
                count += 1
                whole = digests.norm(here.digests[name])
                apart = digests.norm(digests.minus(there.digests[name], here.digests[name]))
                of_kind = sums.setdefault(_kind(name), [0.0, 0.0])
                of_kind[0], of_kind[1] = of_kind[0] + apart * apart, of_kind[1] + whole * whole
                if apart and self._is_more(apart, self._allowed(name, step, here), rounds, name, step):
                    found.append(Difference(_own(name), step, _ratio(apart, whole)))
            ratios = (_ratio(math.sqrt(apart), math.sqrt(whole)) for apart, whole in sums.values())
            largest = max([largest, *ratios], key=_finite_last)
            if found and first is None:
                first, differing = found[0], found
        return Compared(largest, first, tuple(one.name for one in differing), count)

    def _allowed(self, name: str, step: int, here: State) -> float:
        """Return the largest allowed norm of a tensor's difference."""
        whole = digests.norm(here.digests[name])
        before = self._start.digests.get(name)
        changed = whole if before is None else digests.norm(digests.minus(here.digests[name], before))
        return _ROUNDING * self._eps * whole + _ALLOWED * self._eps / EPS_32 * changed

    def _is_more(self, apart: float, allowed: float, rounds: bool, name: str, step: int) -> bool:
        """Return whether a difference exceeds the allowed one, plus a multiple of the nudged run's if `rounds`."""
        if apart <= allowed or not rounds:
            return not apart <= allowed
        nudges = (_between(name, here, there) for at, here, there in _common(self.one, self._nudged) if at <= step)
        return not apart <= allowed + _ABOVE_NUDGE * max(nudges, default=0.0)

    def _metrics(self, other: States, wanted: Any, base: States | None, rounds: bool = True) -> Compared:
        base = self.one if base is None else base
        largest, first, differing, count = 0.0, None, list[Difference](), 0
        for step, here, there in _common(base, other):
            found = []
            for name in (name for name in here.metrics if wanted(name) and name in there.metrics):
                count += 1
                value, apart = abs(here.metrics[name]), _apart(here.metrics[name], there.metrics[name])
                largest = max(largest, _ratio(apart, value), key=_finite_last)
                allowed = _ALLOWED * self._eps / EPS_32 * value
                if apart and self._is_more(apart, allowed, rounds, name, step):
                    found.append(Difference(name, step, _ratio(apart, value)))
            if found and first is None:
                first, differing = found[0], found
        return Compared(largest, first, tuple(one.name for one in differing), count)


def unequal(other: States, wanted: Container[str] | None = None) -> Iterator[tuple[int, str, list[int]]]:
    """Yield the step, the name and the ranks of each tensor whose copies differ between ranks."""
    for step, state in sorted(other.items()):
        for name, ranks in state.unequal.items():
            if wanted is None or name in wanted:
                yield step, _own(name), ranks


def _common(one: States, other: States) -> list[tuple[int, State, State]]:
    return [(step, one[step], other[step]) for step in sorted(one.keys() & other.keys())]


def _between(name: str, one: State, other: State) -> float:
    """Return the distance of a tensor or metric between two states; a missing metric counts as 0."""
    if name in one.digests and name in other.digests:
        return digests.norm(digests.minus(other.digests[name], one.digests[name]))
    return _apart(one.metrics.get(name, 0.0), other.metrics.get(name, 0.0))


def _kind(name: str) -> str:
    """Return the group that a tensor is compared in: all of the module, or one kind of optimizer state."""
    return name.rpartition(".")[2] if name.startswith(OPTIMIZER) else MODEL


def _own(name: str) -> str:
    return name.removeprefix(MODEL)


def _apart(one: float, other: float) -> float:
    return 0.0 if one == other or (one != one and other != other) else abs(one - other)


def _ratio(part: float, whole: float) -> float:
    return 0.0 if part == 0.0 else part / whole if whole else math.inf


def _finite_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
