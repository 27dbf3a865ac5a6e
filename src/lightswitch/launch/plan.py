"""mode=plan: what the run that is asked for would take under each strategy, before it starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf

from lightswitch.batches.plan import BatchPlan
from lightswitch.context import RunContext
from lightswitch.errors import Refused, RefusedRequest
from lightswitch.fault_tolerance.failure import full_traceback, one_line
from lightswitch.launch import build, commands
from lightswitch.planning import candidates, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import Device
from lightswitch.planning.estimate import Estimate, Run, Step, estimate
from lightswitch.planning.fake_group import World
from lightswitch.planning.samples import Samples, first_samples
from lightswitch.planning.simulation import Work, simulate
from lightswitch.preflight import devices, strategies
from lightswitch.runs.resume import shown

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a run is asked to do, and on what."""

    cfg: DictConfig
    device: Device
    world: World
    samples: Samples

    @property
    def trainer(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        plain: Any = OmegaConf.to_container(self.cfg.trainer, resolve=True)
        return dict(plain)


def plan(cfg: DictConfig, run: RunContext) -> None:
    """Log a table of the strategies, the one to take with its command, and write plan.json.

    Raises:
        Refused: there is nothing to plan with, or no strategy can take the run.
    """
    request = _request(cfg)
    estimates, refused = [], {}
    for candidate in _candidates(request, run):
        try:
            estimates += _estimates(request, candidate)
        except Refused as refusal:
            refused[candidate.words[0]] = str(refusal)
    if not estimates:
        raise RefusedRequest([f"{words}: {why}" for words, why in refused.items()])
    estimates.sort(key=report.sort_key)
    log.info("\n%s\n", report.table(estimates))
    for words, why in refused.items():
        log.info("left out   %s: %s", words, why)
    log.info("take       %s", report.answer(estimates[0], request.device))
    log.info("start      %s", commands.planned(cfg, run.placement, _words(request, estimates[0])))
    path = run.run_dir / "plan.json"
    path.write_text(json.dumps(report.as_data(estimates, request.device, refused), indent=1))
    log.info("plan       %s", shown(path))


def _request(cfg: DictConfig) -> Request:
    device: Device = instantiate(cfg.plan.device, _convert_="all").with_memory(cfg.plan.memory_gib)
    refusals: list[Refused] = []
    data: LightningDataModule | None = build.instantiated(cfg, "data", refusals)
    model = build.instantiated(cfg, "model", refusals) if data is None else None
    build.raise_all(refusals)
    owner = model if model is not None else LightningModule()
    plain: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    world = World(plain["num_nodes"], devices.count(plain))
    return Request(cfg, device, world, first_samples(owner, data))


def _candidates(request: Request, run: RunContext) -> list[Candidate]:
    choice = run.hydra.runtime.choices.get("strategy")
    if choice == "auto":
        return candidates.every(run.hydra)
    return candidates.chosen(str(choice), request.trainer["strategy"])


def _estimates(request: Request, candidate: Candidate) -> Iterator[Estimate]:
    """Yield a strategy's estimate, and where the device can't hold it, that with activation checkpointing."""
    found = _fitted(request, candidate)
    yield found
    other = candidate.recomputing()
    if not found.memory.fits and other is not None:
        yield _fitted(request, other)


def _fitted(request: Request, candidate: Candidate) -> Estimate:
    """Return the estimate at the micro batch that was asked for, or else at the largest that fits."""
    cfg = request.cfg
    replicas = max(1, request.world.size // int(candidate.node.get("tensor_parallel_size", 1)))
    batch = BatchPlan.derive(cfg.global_batch_size, cfg.micro_batch_size, replicas)
    _check(request, candidate, batch)
    found = _estimate(request, candidate, batch)
    while cfg.micro_batch_size is None and not found.memory.fits and found.largest_micro_batch:
        largest = min(found.largest_micro_batch, batch.micro_batch - 1)
        share = cfg.global_batch_size // replicas
        micro = max((size for size in range(1, largest + 1) if share % size == 0), default=0)
        if not micro:
            break
        batch = BatchPlan.derive(cfg.global_batch_size, micro, replicas)
        found = _estimate(request, candidate, batch)
    return found


def _check(request: Request, candidate: Candidate, batch: BatchPlan) -> None:
    model: Any = OmegaConf.to_container(request.cfg.model, resolve=True)
    kind, world = request.device.kind, request.world
    asked = strategies.Request(
        dict(candidate.node), model, request.trainer, world.nodes, world.devices_per_node, kind,
        (batch.global_batch, batch.micro_batch),
    )  # fmt: skip
    if problems := list(strategies.problems(asked)):
        raise RefusedRequest(problems)


def _estimate(request: Request, candidate: Candidate, batch: BatchPlan) -> Estimate:
    return estimate(
        candidate.words, _step(request, candidate, batch), _run(request, batch), request.device, candidate.offloads
    )


def _run(request: Request, batch: BatchPlan) -> Run:
    cfg, world = request.cfg, request.world
    steps = cfg.trainer.get("max_steps")
    return Run(
        batch.micro_batch, batch.accumulation, batch.replicas, world.nodes, world.devices_per_node,
        str(cfg.trainer.get("precision")), cfg.matmul_precision,
        steps if steps and steps > 0 else None, cfg.plan.tokens_per_sample, cfg.plan.disk_gb_per_second,
    )  # fmt: skip


def _step(request: Request, candidate: Candidate, batch: BatchPlan) -> Step:
    """Simulate a step; of one that accumulates, two micro batches."""
    clip = {key: value for key, value in request.trainer.items() if key.startswith("gradient_clip")}
    work = Work(
        lambda: _model(request.cfg),
        request.samples.batch,
        batch.micro_batch,
        min(2, batch.accumulation),
        {**clip, **_precision(request.cfg)},
    )
    strategy = instantiate(dict(candidate.node), _convert_="all")
    try:
        return simulate(work, strategy, request.world)
    except Refused:
        raise
    except Exception as error:
        raise RefusedRequest([f"the model fails in a step: {one_line(error)}"], full_traceback(error)) from error


def _precision(cfg: DictConfig) -> dict[str, Any]:
    """Return the Trainer's arguments for the precision; float16 with a loss scale takes what bfloat16 does, and its
    scale is a value."""
    asked = cfg.trainer.get("precision")
    cfg = OmegaConf.create({"trainer": {"precision": "bf16-mixed" if asked in (16, "16", "16-mixed") else asked}})
    refusals: list[Refused] = []
    arguments = {"precision": cfg.trainer.precision, **build.plugins(cfg, None, refusals)}
    build.raise_all(refusals)
    plugins = arguments["plugins"]
    return {**arguments, "plugins": plugins if isinstance(plugins, list) else []}


def _model(cfg: DictConfig) -> LightningModule:
    refusals: list[Refused] = []
    model: LightningModule = build.instantiated(cfg, "model", refusals)
    build.raise_all(refusals)
    return model


def _words(request: Request, best: Estimate) -> list[str]:
    micro = [f"micro_batch_size={best.run.micro_batch}"] if best.run.accumulation > 1 else []
    return [*best.words, *micro]
