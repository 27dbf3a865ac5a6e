"""Comparison of two runs moment by moment, which distinguishes differences from rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from lightswitch.checking.probe import END, FORWARD, LOGGED, MODEL, OPTIMIZER, STEPPED, Digest, minus, norm

EPS_32 = 2.0**-23
_ALLOWED = 1e-5  # relative difference that the promise allows, for 32-bit numbers
_ROUNDING = 16  # units in the last place, in the norm of a tensor
_ABOVE_NUDGE = 10  # times the difference of a nudged run: another split sums in another order in each operation
_MOMENTS = {
    FORWARD: "in the forward pass",
    STEPPED: "by the end of the optimizer's step",
    END: "in a hook after the optimizer's step",
}

Moment = tuple[int, int]  # step, from 1, and FORWARD, STEPPED or END of it; (0, END) is the start


@dataclass(frozen=True)
class State:
    """Recorded state at a moment.

    Attributes:
        digests: of tensors and metrics, by name.
        draws: whether the training step has drawn random numbers.
    """

    digests: Mapping[str, Digest]
    draws: bool = False


States = Mapping[Moment, State]


@dataclass(frozen=True)
class Difference:
    """Tensor or metric that differs between two runs.

    Attributes:
        relative: norm of the difference divided by the norm of the tensor.
    """

    name: str
    moment: Moment
    relative: float

    @property
    def when(self) -> str:
        """The moment in words."""
        step, moment = self.moment
        return f"{_MOMENTS[moment]} of step {step}" if step else "before the first step"


@dataclass(frozen=True)
class Compared:
    """Comparison of two runs in quantities of one kind.

    Attributes:
        largest: largest relative difference of all moments, of all tensors together or of the metric that differs most.
        differing: differences beyond rounding at the first moment that has any.
        count: number of compared values.
    """

    largest: float
    differing: tuple[Difference, ...]
    count: int


class Comparison:
    """Comparison of runs with a reference run of one process.

    A difference counts if it is larger than the effect of rounding. A run whose initial weights are nudged by some
    units in the last place measures that effect. Thus a bias whose gradient is only rounding error, but which Adam
    moves anyway, passes; an average of weights that never moves does not.

    Args:
        one: states of the reference run.
        again: states of an equal start. If it differs, so does the nudged run, which then does not show the effect of
            rounding.
        nudged: returns the states of the nudged run. It is not called before something differs.
        parameters: names of the module's parameters; all other tensors of the module are buffers.
        eps: machine epsilon of the dtype that the run computes in.
        is_exact: equal starts are bitwise equal on this device.
    """

    def __init__(
        self,
        one: States,
        again: States,
        nudged: Callable[[], States],
        parameters: Iterable[str],
        eps: float = EPS_32,
        is_exact: bool = True,
    ) -> None:
        self._one, self._nudge_weights, self._eps, self._is_exact = one, nudged, eps, is_exact
        self._parameters = frozenset(parameters)
        self._start = one[min(one)].digests if one else {}
        self.is_repeated = not self.again(again, one).differing

    @cached_property
    def _nudged(self) -> States:
        return self._nudge_weights() if not self._is_exact or self.is_repeated else {}

    def of_kind(self, kind: str, other: States, base: States | None = None) -> Compared:
        """Compare a run with the reference run, or with another one, in values of one kind.

        Args:
            kind: logged, parameters, buffers, optimizer; or tensors, for all but logged values.
        """
        return self._compared(kind, other, self._one if base is None else base, rounds=True)

    def again(self, other: States, base: States) -> Compared:
        """Compare two runs of one way, which are expected to be equal to the bit on exact devices."""
        return self._compared("tensors", other, base, rounds=not self._is_exact)

    def _is_of(self, kind: str, name: str) -> bool:
        if name.startswith(LOGGED):
            return kind == "logged"
        own = "optimizer" if name.startswith(OPTIMIZER) else "parameters" if name in self._parameters else "buffers"
        return kind in (own, "tensors")

    def _compared(self, kind: str, other: States, base: States, rounds: bool) -> Compared:
        largest, first, count = 0.0, list[Difference](), 0
        for moment in sorted(base.keys() & other.keys()):
            here, there = base[moment].digests, other[moment].digests
            squares: dict[str, list[float]] = {}  # of the norms of differences and of tensors, by group
            found = []
            for name in (name for name in here if self._is_of(kind, name) and name in there):
                count += 1
                whole, apart = norm(here[name]), norm(minus(there[name], here[name]))
                of_group = squares.setdefault(_group(name), [0.0, 0.0])
                of_group[0], of_group[1] = of_group[0] + apart * apart, of_group[1] + whole * whole
                if apart and self._is_more(apart, name, moment, here[name], rounds):
                    found.append(
                        Difference(name.removeprefix(MODEL).removeprefix(LOGGED), moment, _ratio(apart, whole))
                    )
            ratios = [_ratio(math.sqrt(apart), math.sqrt(whole)) for apart, whole in squares.values()]
            largest = max(largest, 0.0, *(math.inf if math.isnan(one) else one for one in ratios))
            first = first or found
        return Compared(largest, tuple(first), count)

    def _is_more(self, apart: float, name: str, moment: Moment, value: Digest, rounds: bool) -> bool:
        """Return whether a difference exceeds the allowed one, plus a multiple of the nudged run's if `rounds`."""
        changed = norm(minus(value, self._start[name])) if name in self._start else norm(value)
        allowed = _ROUNDING * self._eps * norm(value) + _ALLOWED * self._eps / EPS_32 * changed
        if apart <= allowed or not rounds:
            return not apart <= allowed  # true for NaN
        common = (one for one in self._one.keys() & self._nudged.keys() if one <= moment)
        pairs = ((self._one[one].digests, self._nudged[one].digests) for one in common)
        nudges = [norm(minus(there[name], here[name])) for here, there in pairs if name in here and name in there]
        return not apart <= allowed + _ABOVE_NUDGE * max(nudges, default=0.0)


def _group(name: str) -> str:
    """Return the group that a tensor is compared in: all of the module, or one kind of optimizer state."""
    if name.startswith(OPTIMIZER):
        return name.rpartition(".")[2]
    return name if name.startswith(LOGGED) else MODEL


def _ratio(part: float, whole: float) -> float:
    return 0.0 if part == 0.0 else part / whole if whole else math.inf
