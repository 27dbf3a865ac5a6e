"""The plan of a run: its memory and time under each strategy, estimated before it starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from omegaconf import DictConfig

from lightswitch import figures, regular_files
from lightswitch.config.overrides import files_of_group, typed_keys
from lightswitch.context import RunContext
from lightswitch.errors import NeedsValues, Refused, RefusedRequest, shown
from lightswitch.launch import commands
from lightswitch.launch.estimates import Request, confirmed, fitted, requested, states, words_of
from lightswitch.planning import candidates, device, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import Precision
from lightswitch.planning.estimate import STATES, Estimate

log = logging.getLogger(__name__)


def plan(cfg: DictConfig, run: RunContext) -> None:
    """Log a table of the strategies, and the recommended one with its command; write plan.json and its picture.

    Raises:
        Refused: there is no training data, or no strategy supports the run.
    """
    request = requested(cfg)
    among = _candidates(request, run)
    estimates: list[Estimate] = []
    refused: dict[tuple[str, ...], str] = {}
    for candidate in among:
        try:
            estimates += _estimates(request, candidate)
        except NeedsValues as error:
            _tell_states(request, among, str(error))
            return
        except Refused as refusal:
            refused[candidate.words] = str(refusal)
    if not estimates:
        raise RefusedRequest(dict.fromkeys(line for why in refused.values() for line in why.splitlines()))
    among += [other for one in among if (other := one.recomputing()) is not None]
    best, *others = report.ordered([*estimates, *_recomputing(request, estimates, among)])
    estimates = report.ordered([confirmed(request, best, among), *others])
    _report(run, request, estimates, refused)


def _recomputing(request: Request, estimates: list[Estimate], among: list[Candidate]) -> Iterator[Estimate]:
    """Yield an estimate of the best strategy with activation checkpointing, unless there is one already."""
    others = {one.words: one.recomputing() for one in among}
    best = next((other for one in report.ordered(estimates) if (other := others.get(one.words)) is not None), None)
    if best is not None and best.words not in {one.words for one in estimates}:
        yield fitted(request, best)


def _report(run: RunContext, request: Request, estimates: list[Estimate], refused: dict[tuple[str, ...], str]) -> None:
    log.info("\n%s\n", report.table(estimates))
    for left_out in report.left_out(refused, [one.words for one in estimates]):
        log.info("left out   %s", left_out)
    log.info("take       %s", report.answer(estimates[0], request.device))
    for about, message in report.details(estimates[0]):
        log.info("%-10s %s", about, message)
    log.info("start      %s", commands.planned(run.placement, words_of(estimates[0])))
    path = run.run_dir / "plan.json"
    data = report.as_data(estimates, request.device, {" ".join(words): why for words, why in refused.items()})
    regular_files.write_text(path, json.dumps(data, indent=1))
    log.info("plan       %s", shown(path))
    if (missing := figures.missing()) is not None:
        log.info("%s", missing)
        return
    light, _ = report.picture(estimates, request.device).save(run.run_dir / "plan.svg")
    log.info("picture    %s", shown(light))


def _tell_states(request: Request, among: list[Candidate], why: str) -> None:
    """Log the memory of a model's states, if its step depends on values and so can't be simulated."""
    log.warning(
        "the step of %s %s: activations, time, traffic and what fits are unknown",
        request.cfg.model._target_, why,
    )  # fmt: skip
    for candidate in {one.precision and one.precision.name: one for one in among}.values():
        held = states(request.under(candidate).cfg)
        parts = ", ".join(f"{kind} {report.amount(held.get(kind, 0))}" for kind in STATES)
        message = "" if candidate.precision is None else f"{candidate.precision.name}: "
        log.info(
            "states     %s%s: in full on each device under ddp, sharded over all devices under fsdp", message, parts
        )


def _candidates(request: Request, run: RunContext) -> list[Candidate]:
    """Return each strategy in each precision, or only the configured ones."""
    choice = run.hydra.runtime.choices.get("strategy")
    found = [candidates.chosen(choice, request.trainer["strategy"])]
    if choice == "auto":
        found = candidates.every(run.hydra, request.world.nodes, with_zero=request.cfg.plan.deepspeed)
    among = _precisions(request, run)
    return [one.at(precision) for precision in among for one in found] or found


def _precisions(request: Request, run: RunContext) -> list[Precision]:
    cfg = request.cfg
    is_chosen = (
        bool(typed_keys(run.hydra) & {"precision", "trainer.precision"})
        or cfg.trainer.get("precision") != device.UNASKED_PRECISION
    )
    files = files_of_group(run.hydra, "precision")
    return device.compared_precisions(cfg.plan.get("precisions"), files, request.device, is_chosen)


def _estimates(request: Request, candidate: Candidate) -> Iterator[Estimate]:
    """Yield a strategy's estimate and, if it doesn't fit on the device, the one with activation checkpointing."""
    asked = str(request.under(candidate).cfg.trainer.get("precision"))
    if lacking := list(device.precision_problems(asked, request.device)):
        raise RefusedRequest(lacking)
    found = fitted(request, candidate)
    yield found
    other = candidate.recomputing()
    if other is not None and not found.memory.fits:
        yield fitted(request, other)
