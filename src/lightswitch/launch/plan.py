"""The plan of a run: what it would take under each strategy, before it starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from omegaconf import DictConfig

from lightswitch import figures
from lightswitch.context import RunContext
from lightswitch.errors import BatchError, NeedsValues, Refused, RefusedRequest
from lightswitch.launch import commands
from lightswitch.launch.estimates import Request, confirmed, fitted, requested, states, words_of
from lightswitch.planning import candidates, picture, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.estimate import STATES, Estimate
from lightswitch.runs.resume import shown

log = logging.getLogger(__name__)


def plan(cfg: DictConfig, run: RunContext) -> None:
    """Log a table of the strategies, and the one to take with its command; write plan.json and its picture.

    Raises:
        Refused: there is nothing to plan with, or no strategy can take the run.
    """
    request = requested(cfg)
    estimates: list[Estimate] = []
    refused: dict[str, str] = {}
    among = _candidates(request, run)
    for candidate in among:
        try:
            estimates += _estimates(request, candidate)
        except NeedsValues as error:
            _tell_states(cfg, str(error))
            return
        except BatchError as error:
            refused[candidate.words[0]] = str(error)
        except Refused as refusal:
            refused[candidate.words[0]] = str(refusal)
    if not estimates:
        raise RefusedRequest(dict.fromkeys(refused.values()))
    among += [other for one in among if (other := one.recomputing()) is not None]
    best, *others = report.ordered([*estimates, *_best_recomputing(request, estimates, among)])
    estimates = report.ordered([confirmed(request, best, among), *others])
    _tell(cfg, run, request, estimates, refused)


def _best_recomputing(request: Request, estimates: list[Estimate], among: list[Candidate]) -> Iterator[Estimate]:
    """Yield what activation checkpointing would change of the best, if that is not among the estimates."""
    best = report.ordered(estimates)[0]
    (candidate,) = (one for one in among if one.words == best.words)
    other = candidate.recomputing()
    if other is not None and other.words not in {one.words for one in estimates}:
        yield fitted(request, other)


def _tell(
    cfg: DictConfig, run: RunContext, request: Request, estimates: list[Estimate], refused: dict[str, str]
) -> None:
    log.info("\n%s\n", report.table(estimates))
    for words, why in refused.items():
        log.info("left out   %s: %s", words, why)
    log.info("take       %s", report.answer(estimates[0], request.device))
    log.info("start      %s", commands.planned(cfg, run.placement, words_of(estimates[0])))
    path = run.run_dir / "plan.json"
    path.write_text(json.dumps(report.as_data(estimates, request.device, refused), indent=1))
    log.info("plan       %s", shown(path))
    if (missing := figures.missing()) is not None:
        log.info("%s", missing)
        return
    light, _ = picture.memory(estimates, request.device).save(run.run_dir / "plan.svg")
    log.info("picture    %s", shown(light))


def _tell_states(cfg: DictConfig, operator: str) -> None:
    """Say what is known of a model whose step asks for values: what it keeps from one step to the next."""
    held = states(cfg)
    parts = ", ".join(f"{kind} {report.amount(held.get(kind, 0))}" for kind in STATES)
    log.warning(
        "the step of %s asks a tensor for its values (%s), and a plan has none: activations, time and traffic are not "
        "known, and neither is what fits", cfg.model._target_, operator,
    )  # fmt: skip
    log.info("states     %s: whole on each device under ddp, over all of them under fsdp", parts)


def _candidates(request: Request, run: RunContext) -> list[Candidate]:
    choice = run.hydra.runtime.choices.get("strategy")
    if choice == "auto":
        return candidates.every(run.hydra, request.world.nodes, with_zero=request.cfg.plan.deepspeed)
    return candidates.chosen(str(choice), request.trainer["strategy"])


def _estimates(request: Request, candidate: Candidate) -> Iterator[Estimate]:
    """Yield a strategy's estimate, and where the device can't hold it, that with activation checkpointing."""
    found = fitted(request, candidate)
    yield found
    other = candidate.recomputing()
    if other is not None and not found.memory.fits:
        yield fitted(request, other)
