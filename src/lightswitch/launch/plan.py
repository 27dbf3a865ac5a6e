"""The plan of a run: what it would take under each strategy, before it starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf

from lightswitch import figures
from lightswitch.batches.plan import BatchPlan
from lightswitch.context import RunContext
from lightswitch.errors import BatchError, NeedsValues, Refused, RefusedRequest
from lightswitch.fault_tolerance.failure import full_traceback, one_line
from lightswitch.launch import build, commands
from lightswitch.planning import candidates, picture, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import Device
from lightswitch.planning.estimate import Estimate, Run, Step, estimate
from lightswitch.planning.fake_group import World
from lightswitch.planning.samples import Samples, first_samples
from lightswitch.planning.simulation import Work, simulate, without_step
from lightswitch.preflight import devices, strategies
from lightswitch.runs.resume import shown
from lightswitch.strategies.single import Single

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A run that is asked for, and what it is to run on."""

    cfg: DictConfig
    device: Device
    world: World
    samples: Samples
    simulated: dict[tuple[str, BatchPlan], Step] = field(default_factory=dict)  # as they are made

    @property
    def trainer(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        plain: Any = OmegaConf.to_container(self.cfg.trainer, resolve=True)
        return dict(plain)


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
            _tell_states(request, str(error))
            return
        except BatchError as error:
            refused[candidate.words[0]] = str(error)
        except Refused as refusal:
            refused[candidate.words[0]] = str(refusal)
    if not estimates:
        raise RefusedRequest(dict.fromkeys(refused.values()))
    best, *others = report.ordered(estimates)
    among += [other for one in among if (other := one.recomputing()) is not None]
    estimates = report.ordered([_confirmed(request, best, among), *others])
    _tell(cfg, run, request, estimates, refused)


def _tell(
    cfg: DictConfig, run: RunContext, request: Request, estimates: list[Estimate], refused: dict[str, str]
) -> None:
    log.info("\n%s\n", report.table(estimates))
    for words, why in refused.items():
        log.info("left out   %s: %s", words, why)
    log.info("take       %s", report.answer(estimates[0], request.device))
    log.info("start      %s", commands.planned(cfg, run.placement, _words(estimates[0])))
    path = run.run_dir / "plan.json"
    path.write_text(json.dumps(report.as_data(estimates, request.device, refused), indent=1))
    log.info("plan       %s", shown(path))
    if (missing := figures.missing()) is not None:
        log.info("%s", missing)
        return
    light, _ = picture.memory(estimates, request.device).save(run.run_dir / "plan.svg")
    log.info("picture    %s", shown(light))


def _tell_states(request: Request, operator: str) -> None:
    """Say what is known of a model whose step asks for values: what it keeps from one step to the next."""
    cfg = request.cfg
    work = without_step(work_of(request, BatchPlan(1, 1, 1, 1)))
    held = simulate(work, Single(), World(1, 1)).growth.steps[0].peak().by_kind
    parts = ", ".join(f"{kind} {report.gib(held.get(kind, 0))}" for kind in ("parameters", "gradients", "optimizer"))
    log.warning(
        "the step of %s asks a tensor for its values (%s), and a plan has none: activations, time and traffic are not "
        "known, and neither is what fits", cfg.model._target_, operator,
    )  # fmt: skip
    log.info("states     %s GiB: whole on each device under ddp, over all of them under fsdp", parts)


def requested(cfg: DictConfig) -> Request:
    """Return what a config asks for, with the start of its training data.

    Raises:
        Refused: there are none, or they can't be read.
    """
    device: Device = instantiate(cfg.plan.device, _convert_="all").with_memory(cfg.plan.memory_gib)
    refusals: list[Refused] = []
    data: LightningDataModule | None = build.instantiated(cfg, "data", refusals)
    model = build.instantiated(cfg, "model", refusals) if data is None else None
    build.raise_all(refusals)
    owner = model if model is not None else LightningModule()
    plain: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    world = World(plain["num_nodes"], devices.count(plain))
    return Request(cfg, device, world, first_samples(owner, data, shares_streams=not build.shards_itself(cfg)))


def _candidates(request: Request, run: RunContext) -> list[Candidate]:
    choice = run.hydra.runtime.choices.get("strategy")
    if choice == "auto":
        return candidates.every(run.hydra, request.world.nodes)
    return candidates.chosen(str(choice), request.trainer["strategy"])


def _estimates(request: Request, candidate: Candidate) -> Iterator[Estimate]:
    """Yield a strategy's estimate, and where the device can't hold it, that with activation checkpointing."""
    found = _fitted(request, candidate)
    yield found
    other = candidate.recomputing()
    if other is not None and not found.memory.fits:
        yield _fitted(request, other)


def _fitted(request: Request, candidate: Candidate) -> Estimate:
    """Return the estimate at the micro batch that was asked for, or else at the largest that fits.

    The latter follows from the former's simulation; `_confirmed` makes one of its own.
    """
    cfg, batch = request.cfg, batch_of(request, candidate, request.cfg.micro_batch_size)
    check(request, candidate, batch)
    step = _step(request, candidate, batch)
    found = _estimate(request, candidate, step, batch)
    if found.memory.fits or cfg.micro_batch_size is not None or not found.largest_micro_batch:
        return found
    step = replace(step, growth=step.growth.accumulating())
    for micro in _smaller(batch):
        found = _estimate(request, candidate, step, batch_of(request, candidate, micro))
        if found.memory.fits:
            break
    return found


def _confirmed(request: Request, found: Estimate, among: Sequence[Candidate]) -> Estimate:
    """Return an estimate whose own step was simulated, at a smaller micro batch if that has to be."""
    if found.run.accumulation == 1 or request.cfg.micro_batch_size is not None:
        return found
    candidate, largest = next(one for one in among if one.words == found.words), found.largest_micro_batch
    batch = batch_of(request, candidate, found.run.micro_batch)
    alone = replace(request, samples=replace(request.samples, is_cut=False), simulated={})  # how it grows is known
    for micro in (batch.micro_batch, *_smaller(batch)):
        smaller = batch_of(request, candidate, micro)
        found = _estimate(request, candidate, _step(alone, candidate, smaller), smaller)
        found = replace(found, largest_micro_batch=largest)
        if found.memory.fits:
            break
    return found


def batch_of(request: Request, candidate: Candidate, micro: int | None) -> BatchPlan:
    """Return how the global batch is cut under a strategy.

    Raises:
        BatchError: it does not divide.
    """
    replicas = max(1, request.world.size // int(candidate.node.get("tensor_parallel_size", 1)))
    return BatchPlan.derive(request.cfg.global_batch_size, micro, replicas)


def _smaller(batch: BatchPlan) -> list[int]:
    """Return the smaller micro batches that divide a device's share, the largest first."""
    share = batch.global_batch // batch.replicas
    return [size for size in range(batch.micro_batch - 1, 0, -1) if share % size == 0]


def check(request: Request, candidate: Candidate, batch: BatchPlan) -> None:
    """Check what a strategy refuses before a start.

    Raises:
        RefusedRequest: with each of its reasons.
    """
    model: Any = OmegaConf.to_container(request.cfg.model, resolve=True)
    kind, world = request.device.kind, request.world
    asked = strategies.Request(
        dict(candidate.node), model, request.trainer, world.nodes, world.devices_per_node, kind,
        (batch.global_batch, batch.micro_batch),
    )  # fmt: skip
    if problems := list(strategies.problems(asked)):
        raise RefusedRequest(problems)


def _estimate(request: Request, candidate: Candidate, step: Step, batch: BatchPlan) -> Estimate:
    return estimate(candidate.words, step, run_of(request, batch), request.device, candidate.offloads)


def run_of(request: Request, batch: BatchPlan) -> Run:
    """Return the request as an estimate takes it."""
    cfg, world = request.cfg, request.world
    steps = cfg.trainer.get("max_steps")
    return Run(
        batch.micro_batch, batch.accumulation, batch.replicas, world.nodes, world.devices_per_node,
        str(cfg.trainer.get("precision")), cfg.matmul_precision,
        steps if steps and steps > 0 else None, cfg.plan.tokens_per_sample, cfg.plan.disk_gb_per_second,
    )  # fmt: skip


def _step(request: Request, candidate: Candidate, batch: BatchPlan) -> Step:
    """Simulate a step; of one that accumulates, two micro batches."""
    if not candidate.is_simulated:
        raise Refused("its engine asks tensors for their values, and a plan has none; strategy=fsdp shards the same")
    key = (candidate.on_device(), batch)
    if key in request.simulated:
        return request.simulated[key]
    strategy = instantiate(dict(candidate.node), _convert_="all")
    try:
        request.simulated[key] = simulate(work_of(request, batch), strategy, request.world)
        return request.simulated[key]
    except (Refused, NeedsValues):
        raise
    except Exception as error:
        raise RefusedRequest([f"a step of the model fails: {one_line(error)}"], full_traceback(error)) from error


def work_of(request: Request, batch: BatchPlan) -> Work:
    """Return what is simulated: of a step that accumulates, two micro batches."""
    clip = {key: value for key, value in request.trainer.items() if key.startswith("gradient_clip")}
    return Work(
        lambda: _model(request.cfg),
        request.samples.batch,
        request.samples.is_cut,
        batch.micro_batch,
        min(2, batch.accumulation),
        {**clip, **_precision(request.cfg)},
    )


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


def _words(best: Estimate) -> list[str]:
    micro = [f"micro_batch_size={best.run.micro_batch}"] if best.run.accumulation > 1 else []
    return [*best.words, *micro]
