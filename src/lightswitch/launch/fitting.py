"""The choice of a strategy and micro-batch that fit into memory, for `auto`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lightswitch.batches.plan import BatchPlan
from lightswitch.context import RunContext
from lightswitch.errors import Refused, Unplanned
from lightswitch.launch import plan
from lightswitch.launch.plan import Request
from lightswitch.planning import candidates, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import World
from lightswitch.planning.estimate import Estimate
from lightswitch.strategies.ddp import DDP, Single, auto

log = logging.getLogger(__name__)

_STATES_BY_ADAM = 4  # parameters, gradients and two moments, each as large as the parameters
_SMALL_SHARE = 1 / 3  # of a device's memory: a model whose states take less is not simulated


def strategy(cfg: DictConfig, run: RunContext) -> BatchPlan | None:
    """Set the strategy that strategy=auto chooses, and its micro-batch, in a composed config.

    Return the batch, or None if the config stays unchanged: single on one device, ddp on several. Each process that a
    launcher started decides by itself, from the config, the data and its machine's smallest GPU; the handshake refuses
    processes that decide differently. Ranks that this process starts receive its decision.

    Raises:
        Refused: nothing fits; the text says what would.
    """
    device, world = plan.device_of(cfg), plan.world_of(cfg)
    usable = device.usable_bytes(world.devices_per_node)
    among, chosen = candidates.simplest(run.hydra, world.nodes, world.devices_per_node, device), None
    try:
        states = _STATES_BY_ADAM * plan.parameter_bytes(cfg)
        told = f"single or ddp: states are {report.share(states, usable)} on {device.name}"
        if states >= _SMALL_SHARE * usable:
            chosen, found = first_that_fits(plan.requested(cfg, prepares_data=not run.placement.is_external), among)
            told, words = report.took(found, device), plan.words_of(found)
    except Unplanned as unplanned:
        told = f"single or ddp, because the model's memory is unknown: {unplanned}"
    finally:
        gc.collect()  # off until the run is built: free what was simulated
    if run.is_first:
        log.info("auto       %s", told)
    return None if chosen is None else _put(chosen, words, cfg, run)


def first_that_fits(request: Request, among: Sequence[Candidate]) -> tuple[Candidate, Estimate]:
    """Return the first strategy that fits, with its estimate.

    Raises:
        Refused: none does.
        Unplanned: no strategy's step could be simulated.
    """
    tried: list[tuple[Candidate, Estimate]] = []
    for candidate in among:
        try:
            found = plan.fitted(request, candidate)
            if found.memory.fits:
                found = plan.confirmed(request, found, [candidate])
        except Unplanned:
            raise
        except Refused:  # the strategy does not support the run
            continue
        if found.memory.fits:
            return candidate, found
        tried.append((candidate, found))
    if not tried:
        raise Unplanned(["no strategy supports the run"])
    raise Refused(f"strategy=auto: {_what_would(tried, request)}")


def _what_would(tried: Sequence[tuple[Candidate, Estimate]], request: Request) -> str:
    """Return a text on the strategy that takes the least memory, and on what would let it fit."""
    every = [found for _, found in tried]
    least = min(every, key=lambda found: found.memory.bytes)
    sharding = [found for candidate, found in tried if candidate.shards_all]
    return f"{report.answer(least, request.device)}; {candidates.what_would_fit(every, sharding, request.device)}"


def _put(candidate: Candidate, words: Sequence[str], cfg: DictConfig, run: RunContext) -> BatchPlan:
    run.process.decided.extend(words)
    micro = dict(word.split("=", 1) for word in words).get("micro_batch_size", cfg.micro_batch_size)
    with open_dict(cfg):
        cfg.trainer.strategy = dict(candidate.node)
        cfg.micro_batch_size = None if micro is None else int(micro)
    return BatchPlan.derive(cfg.global_batch_size, cfg.micro_batch_size, plan.world_of(cfg).size)


def largest_micro_batch(cfg: DictConfig, run: RunContext) -> BatchPlan:
    """Set the largest micro-batch that fits under the run's strategy in a composed config; return the batch.

    It is found by simulation, so that no device has to run out of memory. It divides a device's share of the global
    batch, so the run's results stay the same.

    Raises:
        Refused: none fits, or a step can't be simulated.
    """
    try:
        request = plan.requested(cfg, prepares_data=not run.placement.is_external)
        candidate = _run_under(cfg, run, request.world)
        found = plan.confirmed(request, plan.fitted(request, candidate), [candidate])
    except Unplanned as unplanned:
        raise Refused(
            f"micro_batch_size=auto: the memory of a step is unknown: {unplanned}; type micro_batch_size=N"
        ) from unplanned
    finally:
        gc.collect()  # off until the run is built: free what was simulated
    if not found.memory.fits:
        what_would = candidates.what_would_fit([found], [], request.device)
        raise Refused(f"micro_batch_size=auto: {report.answer(found, request.device)}; {what_would}")
    if run.is_first:
        log.info("auto       %s", report.took(found, request.device))
    batch = plan.batch_of(request, candidate, found.run.micro_batch)
    run.process.decided.append(f"micro_batch_size={batch.micro_batch}")
    with open_dict(cfg):
        cfg.micro_batch_size = batch.micro_batch
    return batch


def _run_under(cfg: DictConfig, run: RunContext, world: World) -> Candidate:
    """Return the run's strategy; single or ddp while strategy=auto has chosen no other."""
    node: Any = OmegaConf.to_container(cfg.trainer, resolve=True).get("strategy")  # type: ignore[union-attr]  # a node
    if isinstance(node, dict) and node.get("_target_") != _path(auto):
        return candidates.chosen(run.hydra.runtime.choices.get("strategy"), node)
    name, cls = ("single", Single) if world.size == 1 else ("ddp", DDP)
    return candidates.chosen(name, {"_target_": _path(cls)})


def _path(known: Any) -> str:
    return f"{known.__module__}.{known.__qualname__}"
