"""Two runs held against one another, moment by moment, and what of their difference is more than rounding."""

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
_ALLOWED = 1e-5  # of 32-bit numbers, relative: the promise's own
_ROUNDING = 16  # units in the last place of a tensor, in the norm
_ABOVE_NUDGE = 10  # times what a nudged run comes to: the other cut adds otherwise in each operation
EPS_32 = 2.0**-23


@dataclass(frozen=True)
class State:
    """State before a step, which is the one after the step before.

    Attributes:
        digests: of tensors, by name.
        metrics: that were logged, by name.
        counted: optimizer steps, as the Trainer counts them.
        unequal: ranks whose copy differs, by name.
    """

    digests: Mapping[str, Digest]
    metrics: Mapping[str, float]
    counted: int
    unequal: Mapping[str, list[int]]


States = Mapping[int, State]  # by the number of steps that were taken before


def states(moments: Iterable[Mapping[str, Any]]) -> dict[int, State]:
    """Return the states before each step, and after the last."""
    return {
        one["step"]: State(one["digests"], one["metrics"], one["counted"], one["unequal"])
        for one in moments
        if one["moment"] == START
    }


@dataclass(frozen=True)
class Difference:
    """First difference of two runs.

    Attributes:
        name: of a tensor as the module has it, of a state of an optimizer, or of a metric.
        step: after which it differs, from 1; 0 for the state at the start.
        relative: norm of the difference by the norm of the tensor.
    """

    name: str
    step: int
    relative: float


@dataclass(frozen=True)
class Compared:
    """Two runs, in quantities of one kind.

    Attributes:
        largest: relative difference over all steps, of all tensors together, or of the metric that differs most.
        first: what differs by more than rounding; None where nothing does.
        differing: names of all that differ at that step.
        count: of what was compared.
    """

    largest: float
    first: Difference | None
    differing: tuple[str, ...]
    count: int


class Comparison:
    """Comparison of runs with one run, of one process.

    A difference counts where it is larger than what becomes of rounding: that is measured by a run whose initial
    weights are nudged by some units in the last place. A bias whose gradient is nothing but rounding, and that Adam
    moves all the same, so holds; an average of weights that never moves does not.

    Args:
        one: its states.
        again: returns those of an equal start. Where it differs, so does the nudged run, and tells nothing of rounding.
        nudged: returns those of the nudged run; neither is called before something differs.
        parameters: the names of the module's parameters; all else of the module are buffers.
        eps: of the numbers that the run computes with.
        is_exact: on this device, equal starts are equal to the bit.
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
        """Names of what is logged and differs between equal starts whose tensors do not, as a time."""
        if self.again(self._started_again, self.one)[1].first is not None:
            return set()
        return {
            name
            for _, here, there in _common(self.one, self._started_again)
            for name, value in here.metrics.items()
            if _apart(value, there.metrics.get(name, value))
        }

    def again(self, other: States, base: States) -> tuple[Compared, Compared]:
        """Compare the losses, and all tensors, of two runs of one way, which are equal to the bit where devices are
        exact."""
        rounds = not self.is_exact
        return (
            self._metrics(other, lambda name: name == LOSS, base, rounds),
            self._tensors(other, lambda name: True, base, rounds),
        )

    def parameters(self, other: States, base: States | None = None) -> Compared:
        """Compare parameters with those of another run.

        Args:
            base: what to hold it against in place of the one process.
        """
        return self._tensors(other, lambda name: name in self._parameters, base)

    def buffers(self, other: States, base: States | None = None) -> Compared:
        """Compare buffers, persistent or not, and what else a module has in its state."""
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
        """Compare what else is logged, without what two equal starts log otherwise."""
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
        """Return the norm that the difference of a tensor may have."""
        whole = digests.norm(here.digests[name])
        before = self._start.digests.get(name)
        changed = whole if before is None else digests.norm(digests.minus(here.digests[name], before))
        return _ROUNDING * self._eps * whole + _ALLOWED * self._eps / EPS_32 * changed

    def _is_more(self, apart: float, allowed: float, rounds: bool, name: str, step: int) -> bool:
        """Return whether a difference is more than what is allowed, beside what a nudge of the weights comes to."""
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
    """Yield the step, the name and the ranks of each tensor of which ranks hold different copies."""
    for step, state in sorted(other.items()):
        for name, ranks in state.unequal.items():
            if wanted is None or name in wanted:
                yield step, _own(name), ranks


def _common(one: States, other: States) -> list[tuple[int, State, State]]:
    return [(step, one[step], other[step]) for step in sorted(one.keys() & other.keys())]


def _between(name: str, one: State, other: State) -> float:
    """Return how far a tensor or a metric of two states is apart; 0 where one has none."""
    if name in one.digests and name in other.digests:
        return digests.norm(digests.minus(other.digests[name], one.digests[name]))
    return _apart(one.metrics.get(name, 0.0), other.metrics.get(name, 0.0))


def _kind(name: str) -> str:
    """Return which tensors are taken together: all of a module, and each kind of an optimizer's state."""
    return name.rpartition(".")[2] if name.startswith(OPTIMIZER) else MODEL


def _own(name: str) -> str:
    return name.removeprefix(MODEL)


def _apart(one: float, other: float) -> float:
    return 0.0 if one == other or (one != one and other != other) else abs(one - other)


def _ratio(part: float, whole: float) -> float:
    return 0.0 if part == 0.0 else part / whole if whole else math.inf


def _finite_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
