"""Ten causes of a difference between two runs, each with the measurement that shows it and a remedy.

The measurements describe the module at certain moments of a step, in one process and under a strategy. Only batch norm
is identified by the name of a class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightswitch.checking import digests
from lightswitch.checking.comparison import Compared, Comparison, State, States, unequal
from lightswitch.checking.digests import Digest
from lightswitch.checking.probe import (
    BACKWARD,
    BEFORE_STEP,
    FORWARD,
    GRADIENT,
    MODEL,
    MODULE,
    OPTIMIZER,
    START,
    STEPPED,
)
from lightswitch.checking.runs import Measured
from lightswitch.errors import listed

_REPRODUCED = 0.5  # largest difference from one process with the same micro-batches, relative to the strategy's
_FITS = 0.1  # largest residual of a weighted sum, relative to that of a mean over micro-batches
_SUM = 0.05  # relative tolerance of the weights of a sum

# The module's code that runs between the previous moment and each of these
_BETWEEN = {
    FORWARD: ("on_train_batch_start", "training_step", "on_before_backward"),
    BACKWARD: ("the backward pass", "on_after_backward"),
    BEFORE_STEP: ("on_before_optimizer_step",),
    STEPPED: ("the optimizer's step",),
    START: ("on_train_batch_end", "on_train_epoch_end"),
}
_ALWAYS = ("training_step", "the backward pass", "the optimizer's step")  # even if the module does not define them


@dataclass(frozen=True)
class Cause:
    """Probable cause of a difference.

    Attributes:
        name: one of the ten, or "unknown".
        told: the measurement that shows it.
        remedy: what to do about it.
        when: the first tensor that differs, and the moments between which it changes.
    """

    name: str
    told: str
    remedy: str
    when: str = ""


REMEDIES = {
    "batch norm": "type trainer.sync_batchnorm=true on GPUs, use a norm over a sample's own features (GroupNorm, "
    "LayerNorm), or give the same micro_batch_size everywhere",
    "loss that is no mean over samples": 'return {"loss": loss, "items": n} where the loss is a mean over n items, '
    "such as tokens; replace a sum, or a loss divided by the batch size, by a mean over samples",
    "loss over the local batch": "gather the tensors that the loss compares from all devices (self.all_gather, "
    "sync_grads=True), or give the same micro_batch_size everywhere",
    "noise by rank": "draw it in the dataset, where each sample has its own seed, or set dropout and other noise to 0 "
    "and check again: several devices draw different numbers than one process, which affects only this comparison",
    "weights written outside of the optimizer": "write to parameters in place (mul_, lerp_, copy_) in a hook, from "
    "values that are the same on all devices (self.all_gather), keep averages in parameters that are frozen, or use "
    "strategy=ddp",
    "buffers that ranks change each for itself": "gather the values from all devices before they are written to the "
    "buffer (self.all_gather), so that each device writes the same values",
    "generator that nobody seeds": "draw from the global generators of torch, NumPy and Python, which are seeded at "
    "each step, or seed yours from self.trainer.global_step",
    "state in Python objects": "keep it in a persistent buffer (register_buffer), or write it in on_save_checkpoint "
    "and read it in on_load_checkpoint",
    "optimizer stepped past Lightning": "call step() of what self.optimizers() returns, so that steps are counted: "
    "limits, schedules and checkpoints depend on the count",
    "operation that the strategy can't do": "use strategy=ddp, or rewrite the line that the traceback names",
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Evidence:
    """Moments of a run under a way to train, and of runs in one process.

    Attributes:
        one: moments of one process.
        cut: moments of one process with the way's micro-batches; empty if the micro-batches are the same.
        way: moments of the way.
    """

    one: Sequence[Mapping[str, Any]]
    cut: Sequence[Mapping[str, Any]]
    way: Sequence[Mapping[str, Any]]


def of_one(one: Measured, comparison: Comparison) -> Iterator[Cause]:
    """Yield the causes that one process shows: uncounted steps, different equal starts, or a different resume."""
    whole, killed, resumed = (one.states.get(name, {}) for name in ("whole", "killed", "resumed"))
    counted = [state.counted for state in whole.values()]
    moved = comparison.parameters({max(whole): whole[min(whole)]}).first
    if counted and max(counted) == 0 and moved is not None:
        yield _cause(
            "optimizer stepped past Lightning",
            f"{moved.name} was trained for {max(whole)} steps, but the Trainer counted none of them, so nothing "
            "was saved",
        )
        return
    started = _differs(comparison, killed, whole)
    if started is not None:
        yield _cause(
            "generator that nobody seeds",
            f"two equal starts of one process differ: {started.name} after step {started.step}",
        )
        return
    again = _differs(comparison, resumed, whole)
    if again is None:
        return
    begun = min(resumed)
    _, at_start = comparison.again({begun: resumed[begun]}, whole)
    if at_start.first is None:
        message = f"all tensors are restored at step {begun}, but {again.name} differs after step {again.step}"
    else:
        is_saved = not comparison.names.isdisjoint(at_start.differing)
        why = "a hook such as on_train_start sets it again" if is_saved else "no checkpoint contains it"
        message = f"{listed(at_start.differing)} is not restored at step {begun}: {why}"
    yield _cause("state in Python objects", message)


def of_failure(way: Measured) -> Cause:
    """Return the cause of a run that fails under a strategy but trains in one process."""
    return _cause("operation that the strategy can't do", f"{way.way.name} raises {way.whole.problem}")


def of_difference(evidence: Evidence, comparison: Comparison, whole: States) -> Cause:
    """Return the cause of a way's difference from one process.

    Args:
        whole: states of the way's whole run.
    """
    first = comparison.all_tensors(whole).first
    loss = comparison.loss(whole).first
    module = next(one for one in evidence.one if one["moment"] == MODULE)
    when = "" if first is None else _when(first.name, first.step, evidence, module["hooks"])
    found = _of_difference(evidence, comparison, whole, module)
    if found is None:
        unexplained = listed([one.name for one in (loss, first) if one is not None])
        message = f"none of the ten known causes explains why {unexplained or 'a replica'} differs"
        return Cause(
            UNKNOWN, message, "set check.steps=2 and remove parts of training_step until the check passes", when
        )
    return Cause(found.name, found.told, found.remedy, when)


def _of_difference(
    evidence: Evidence, comparison: Comparison, whole: States, module: Mapping[str, Any]
) -> Cause | None:
    differing = comparison.all_tensors(whole)
    metric = comparison.loss(whole).first or comparison.logged(whole).first  # the latter in manual optimization
    in_first_forward = metric is not None and metric.step == 1
    norms = [name for name in module["batch_norms"] if _is_of_batch(name, evidence.one)]
    names: list[str] = []
    apart = next(
        ((step, [name]) for step, name, _ in unequal(whole, {f"{MODEL}{name}" for name in comparison.names})), None
    )
    if differing.first is not None:
        apart = differing.first.step, list(differing.differing)
    if apart is not None:
        step, names = apart
        written = [name for name in names if _written_outside(name, step, evidence.one, comparison)]
        earlier = not in_first_forward or any(_is_written_in(FORWARD, name, step, evidence.one) for name in written)
        if written and earlier:
            moments = _moments_of(written[0], step, evidence.one)
            return _cause(
                "weights written outside of the optimizer",
                f"{listed(written)} changes in {listed([_told(one, module['hooks']) for one in moments])}",
            )
        buffers = _unequal_buffers(evidence.way, comparison, norms)
        if buffers and (not in_first_forward or buffers[0] in names):
            return _cause(
                "buffers that ranks change each for itself",
                f"{listed(buffers)} differs between ranks within a step",
            )
    if metric is not None and (apart is None or metric.step <= apart[0]) and _draws(metric.step, evidence.one):
        return _cause(
            "noise by rank", f"the training step draws random numbers, and the loss of step {metric.step} differs"
        )
    is_reproduced = _reproduces(evidence, whole, comparison)
    if norms and (is_reproduced or any(f"{name}.running_mean" in names for name in norms)):
        message = f"{listed(norms)} computes its statistics over a micro batch"
        also = "; one process with the same micro batches gives the same run"
        return _cause("batch norm", f"{message}{also if is_reproduced else ''}")
    if not is_reproduced:
        return None
    weights, left = _weights_of_micro_batches(evidence)
    same = "one process with the micro batches of a device gives the same run"
    if left <= _FITS:
        total = math.fsum(weights)
        squared = len(weights) ** 2  # each micro-batch's gradient comes divided by their number
        kind = "a sum" if abs(total - squared) <= _SUM * squared else "a mean over something else"
        return _cause(
            "loss that is no mean over samples", f"{same}; the loss of a batch is {kind} of its parts' losses"
        )
    return _cause(
        "loss over the local batch", f"{same}; the loss of a batch is not a weighted sum of its parts' losses"
    )


def _is_of_batch(norm: str, moments: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a batch norm takes the statistics of a micro batch: its running ones change, or it has none."""
    statistics = f"{MODEL}{norm}.running_mean"
    found = [one["digests"][statistics] for one in moments if statistics in one.get("digests", ())]
    return not found or found[0] != found[-1]


def _draws(step: int, moments: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the module draws random numbers in the forward pass of a step, counted from 1."""
    return any(one.get("draws") for one in moments if one["moment"] == FORWARD and one["step"] == step - 1)


def _cause(name: str, told: str) -> Cause:
    return Cause(name, told, REMEDIES[name])


def _differs(comparison: Comparison, one: States, other: States) -> Any:
    """Return the earliest difference between two runs of one way; in one step, a tensor's before the loss's."""
    found = (compared.first for compared in reversed(comparison.again(one, other)))
    return min((first for first in found if first is not None), key=lambda first: first.step, default=None)


def _changes(moments: Sequence[Mapping[str, Any]], name: str, step: int) -> Iterator[tuple[str, float]]:
    """Yield the moments of a step by which a tensor has changed since the previous moment, and the change's norm.

    Args:
        step: number of the step, from 1; its last moment is the start of the next step.
    """
    before: Digest | None = None
    earlier = ""
    for one in moments:
        is_of_step = one["moment"] != MODULE and (
            one["step"] == step - 1 or (one["step"] == step and one["moment"] == START)
        )
        if not is_of_step or (now := one["digests"].get(f"{MODEL}{name}")) is None:
            continue
        if before is not None and (change := digests.norm(digests.minus(now, before))):
            # with several manually stepped optimizers, each optimizer's step ends at the next one's forward pass
            yield STEPPED if earlier == BEFORE_STEP else one["moment"], change
        before, earlier = now, one["moment"]


def _moments_of(name: str, step: int, moments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the moments by which a tensor has changed outside of an optimizer step."""
    return list(dict.fromkeys(moment for moment, _ in _changes(moments, name, step) if moment != STEPPED))


def _written_outside(name: str, step: int, moments: Sequence[Mapping[str, Any]], comparison: Comparison) -> bool:
    return name in comparison.names and bool(_moments_of(name, step, moments))


def _is_written_in(moment: str, name: str, step: int, moments: Sequence[Mapping[str, Any]]) -> bool:
    return moment in _moments_of(name, step, moments)


def _told(moment: str, hooks: Sequence[str]) -> str:
    """Return the names of the module's code that runs before a moment."""
    named = [one for one in _BETWEEN[moment] if one in hooks or one in _ALWAYS]
    return listed(named or list(_BETWEEN[moment][:1]), separator=" or ")


def _when(name: str, step: int, evidence: Evidence, hooks: Sequence[str]) -> str:
    """Return which code changes a tensor in one process, and whether it changes under the strategy at all."""
    if name.startswith(OPTIMIZER):
        return f"{name} differs first, after step {step}: it changes in the optimizer's step"
    here = list(dict.fromkeys(moment for moment, _ in _changes(evidence.one, name, step)))
    there = [moment for moment, _ in _changes(evidence.way, name, step)]
    in_one = listed([_told(one, hooks) for one in here], separator=" and ")
    message = f"{name} differs first, after step {step}: in one process it "
    message += f"changes in {in_one}" if in_one else "does not change"
    return message if there else f"{message}; under the strategy it does not change"


def _unequal_buffers(moments: Sequence[Mapping[str, Any]], comparison: Comparison, norms: Sequence[str]) -> list[str]:
    """Return the buffers whose copies differ between ranks at some moment, without those of batch norms."""
    unequal = (name for one in moments for name in one.get("unequal", ()))
    found = (name.removeprefix(MODEL) for name in unequal if name.startswith(MODEL))  # no optimizer's state
    return list(
        dict.fromkeys(name for name in found if name not in comparison.names and name.rpartition(".")[0] not in norms)
    )


def _reproduces(evidence: Evidence, whole: States, comparison: Comparison) -> bool:
    """Return whether one process with the way's micro-batches shows the same difference as the way."""
    cut = {one["step"]: State(one["digests"], one["metrics"], 0, {}) for one in evidence.cut if one["moment"] == START}
    there, again = comparison.loss(whole), comparison.loss(cut)
    if not again.count:
        there, again = comparison.parameters(whole), comparison.parameters(cut)
    between = _largest(comparison, whole, cut)
    return again.first is not None and between <= _REPRODUCED * there.largest


def _largest(comparison: Comparison, one: States, other: States) -> float:
    compared: Compared = comparison.loss(one, other)
    return (compared if compared.count else comparison.parameters(one, other)).largest


def _weights_of_micro_batches(evidence: Evidence) -> tuple[list[float], float]:
    """Fit a weighted sum of the gradients of a step's micro-batches to the gradient of its whole batch.

    The fit minimizes the squared error over the digests of all gradients. A mean over samples has weights of 1, because
    the losses of micro-batches are divided by their number.

    Returns:
        The weights, and the residual relative to that of equal weights.
    """
    whole = _gradients(evidence.one, 0)[-1:]
    sums = _gradients(evidence.cut, 0)
    if not whole or len(sums) < 2:
        return [], math.inf
    names = sorted(whole[0].keys() & sums[0].keys())
    target = [value for name in names for value in whole[0][name]]
    columns, before = [], [0.0] * len(target)
    for micro in sums:
        now = [value for name in names for value in micro.get(name, [0.0] * digests.LENGTH)]
        columns.append([a - b for a, b in zip(now, before, strict=True)])
        before = now
    import numpy as np

    matrix, wanted = np.array(columns).T, np.array(target)
    weights, *_ = np.linalg.lstsq(matrix, wanted, rcond=None)
    apart = np.linalg.norm(wanted - matrix.sum(1))
    left = np.linalg.norm(wanted - matrix @ weights) / apart if apart else 0.0
    return [float(weight) for weight in weights], float(left)


def _gradients(moments: Sequence[Mapping[str, Any]], step: int) -> list[dict[str, Digest]]:
    """Return the accumulated gradients after each of a step's micro-batches."""
    return [
        {name: digest for name, digest in one["digests"].items() if name.startswith(GRADIENT)}
        for one in moments
        if one["moment"] == BACKWARD and one["step"] == step
    ]
