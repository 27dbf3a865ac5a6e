"""Estimates of a run's memory and time under a strategy: steps are simulated, and the rest is arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from omegaconf import DictConfig, OmegaConf

from lightswitch.batches.plan import BatchPlan
from lightswitch.cluster import placement
from lightswitch.config.hydra_versions import instantiate
from lightswitch.errors import NeedsValues, Refused, RefusedRequest, Unplanned
from lightswitch.failures.classify import full_traceback, one_line
from lightswitch.launch import instantiation
from lightswitch.launch.instantiation import instantiated, plugins, raise_all, shards_itself
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import Device
from lightswitch.planning.estimate import STATES, Estimate, Run, Step, estimate
from lightswitch.planning.fakes import World, plan_in_bfloat16
from lightswitch.planning.samples import Samples, first_samples
from lightswitch.planning.simulation import Work, simulate, without_step
from lightswitch.planning.timeline import Kind
from lightswitch.preflight import devices, strategies
from lightswitch.strategies.ddp import Single


@dataclass(frozen=True)
class Request:
    """A requested run, and the devices for which it is estimated."""

    cfg: DictConfig
    device: Device
    world: World
    samples: Samples
    computes: bool = True  # False: a step uses each parameter, but doesn't run the model
    simulated: dict[tuple[str, BatchPlan], Step] = field(default_factory=dict)  # cache of steps

    @property
    def trainer(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        plain: Any = OmegaConf.to_container(self.cfg.trainer, resolve=True)
        return dict(plain)

    def under(self, candidate: Candidate) -> Request:
        """Return the run in a candidate's precision."""
        if candidate.precision is None:
            return self
        cfg = self.cfg.copy()
        OmegaConf.update(cfg, "trainer.precision", candidate.precision.value, merge=False, force_add=True)
        return replace(self, cfg=cfg)


def requested(cfg: DictConfig, prepares_data: bool = True) -> Request:
    """Return the run that a config requests, on the device that its `plan` node names.

    Args:
        prepares_data: whether to prepare the data; False if other processes of the run may do it at the same time.

    Raises:
        Refused: there is no training data, or a constructor rejects its arguments.
        Unplanned: user code has failed to load the training data.
    """
    refusals = instantiation.refused_optimizers(cfg)
    data: LightningDataModule | None = instantiated(cfg, "data", refusals)
    model = instantiated(cfg, "model", refusals) if data is None else None
    raise_all(refusals)
    owner = model if model is not None else LightningModule()
    with _own_code("loading the training data"):
        samples = first_samples(owner, data, not shards_itself(cfg), prepares_data)
    return Request(cfg, device_of(cfg), world_of(cfg), samples)


def of_states(cfg: DictConfig, device: Device, world: World) -> Request:
    """Return a request whose steps only use each parameter, so that only the run's states can be estimated."""
    return Request(cfg, device, world, Samples(torch.empty, is_cut=False, owner=None, loaders=None), computes=False)


def device_of(cfg: DictConfig) -> Device:
    """Return the device that the config's `plan` node names, with its memory."""
    device: Device = instantiate(cfg.plan.device)
    return device.with_memory(cfg.plan.memory_gib)


def world_of(cfg: DictConfig) -> World:
    """Return the number of nodes, and of devices on each, of the run; nodes that differ count as nodes of one device.

    All processes have to decide alike, and know only the number of all devices.
    """
    if world := placement.detect().uneven:
        return World(world, 1)
    plain: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    return World(plain["num_nodes"], devices.count(plain))


def parameter_bytes(cfg: DictConfig) -> float:
    """Return the bytes of the model's parameters in the run's precision.

    The model is built on the meta device, which takes no memory.

    Raises:
        Unplanned: it can't be built there.
    """
    with _own_code("building the model"), torch.device("meta"):
        model = _model(cfg)
        model.configure_model()
    in_16_bits = str(cfg.trainer.get("precision")) in ("16-true", "bf16-true")
    return sum(parameter.numel() * (2 if in_16_bits else parameter.itemsize) for parameter in model.parameters())


def states(cfg: DictConfig) -> Mapping[Kind, float]:
    """Return the bytes of the model's states by kind: parameters, gradients and optimizer state, without sharding.

    Raises:
        Unplanned: the model can't be built, or its optimizer can't step, on tensors without values.
    """
    alone = Candidate((), {"_target_": f"{Single.__module__}.{Single.__name__}"})
    step = _step(of_states(cfg, device_of(cfg), World(1, 1)), alone, BatchPlan(1, 1, 1, 1))
    return {kind: bytes for kind, bytes in step.growth.steps[0].peak().by_kind.items() if kind in STATES}


def fitted(request: Request, candidate: Candidate) -> Estimate:
    """Return the estimate at the configured micro-batch, or at the largest that fits if none is configured.

    The largest is extrapolated from the simulated step of a device's whole share; `confirmed` simulates it.

    Raises:
        NeedsValues: see `simulate`.
        Refused: the strategy, or the module, doesn't support the run.
    """
    request = request.under(candidate)
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


def confirmed(request: Request, found: Estimate, among: Sequence[Candidate]) -> Estimate:
    """Return an estimate with its step simulated if it was extrapolated, at a smaller micro-batch if necessary."""
    if found.run.accumulation == 1 or request.cfg.micro_batch_size is not None:
        return found
    candidate, largest = next(one for one in among if one.words == found.words), found.largest_micro_batch
    request = request.under(candidate)
    batch = batch_of(request, candidate, found.run.micro_batch)
    alone = replace(request, samples=replace(request.samples, is_cut=False), simulated={})  # its growth is known
    for micro in (batch.micro_batch, *_smaller(batch)):
        smaller = batch_of(request, candidate, micro)
        found = _estimate(request, candidate, _step(alone, candidate, smaller), smaller)
        found = replace(found, largest_micro_batch=largest)
        if found.memory.fits:
            break
    return found


def words_of(found: Estimate) -> list[str]:
    """Return the overrides that choose an estimate's strategy and micro-batch."""
    micro = [f"micro_batch_size={found.run.micro_batch}"] if found.run.accumulation > 1 else []
    return [*found.words, *micro]


def batch_of(request: Request, candidate: Candidate, micro: int | None) -> BatchPlan:
    """Return how a strategy divides the global batch into micro-batches."""
    replicas = max(1, request.world.size // int(candidate.node.get("tensor_parallel_size", 1)))
    return BatchPlan.derive(request.cfg.global_batch_size, micro, replicas)


def _smaller(batch: BatchPlan) -> list[int]:
    """Return the smaller micro-batches that divide a device's share of the global batch, the largest first."""
    share = batch.micro_batch * batch.accumulation
    return [size for size in range(batch.micro_batch - 1, 0, -1) if share % size == 0]


def check(request: Request, candidate: Candidate, batch: BatchPlan) -> None:
    """Check that the strategy and the precision support the run, as far as this is known before a start.

    Raises:
        RefusedRequest: they don't; the error has each of the reasons.
    """
    plain: Any = OmegaConf.to_container(request.cfg, resolve=True)
    kind, world = request.device.kind, request.world
    asked = strategies.Request(
        dict(candidate.node), plain["model"], plain["trainer"], world.nodes, world.devices_per_node, kind,
        (batch.global_batch, batch.micro_batch),
    )  # fmt: skip
    plain["trainer"]["strategy"] = candidate.node
    if problems := [
        *strategies.of_disk(candidate.node),
        *strategies.problems(asked),
        *strategies.precision_problems(plain, kind),
    ]:
        raise RefusedRequest(problems)


def _estimate(request: Request, candidate: Candidate, step: Step, batch: BatchPlan) -> Estimate:
    return estimate(candidate.words, step, run_of(request, candidate, batch), request.device, candidate.on_host)


def run_of(request: Request, candidate: Candidate, batch: BatchPlan) -> Run:
    """Return the request in the form that `estimate` takes."""
    cfg, world = request.cfg, request.world
    steps, precision = cfg.trainer.get("max_steps"), str(cfg.trainer.get("precision"))
    return Run(
        batch.micro_batch, batch.accumulation, batch.replicas, world.nodes, world.devices_per_node,
        precision, cfg.matmul_precision,
        steps if steps and steps > 0 else None, cfg.plan.tokens_per_sample, cfg.plan.disk_gb_per_second,
        batch.global_batch, None if precision.endswith("mixed") else candidate.param_dtype,
    )  # fmt: skip


def _step(request: Request, candidate: Candidate, batch: BatchPlan) -> Step:
    """Simulate a step, of two micro-batches under gradient accumulation."""
    key = (candidate.on_device(), batch)
    if key in request.simulated:
        return request.simulated[key]
    strategy = strategy_of(request, candidate)
    with _own_code("a step of the model"):
        request.simulated[key] = simulate(work_of(request, batch), strategy, request.world)
    return request.simulated[key]


def strategy_of(request: Request, candidate: Candidate) -> Strategy:
    """Return the strategy to simulate."""
    strategy: Strategy = instantiate(dict(candidate.node))
    if isinstance(strategy, DeepSpeedStrategy) and str(request.cfg.trainer.get("precision")).startswith("16"):
        plan_in_bfloat16(strategy)
    return strategy


@contextmanager
def _own_code(what: str) -> Iterator[None]:
    """Context manager that reports an error of user code in one line.

    Raises:
        Unplanned: the code has failed.
    """
    try:
        yield
    except (Refused, NeedsValues):
        raise
    except Exception as error:
        raise Unplanned([f"{what} fails: {one_line(error)}"], full_traceback(error)) from error


def work_of(request: Request, batch: BatchPlan) -> Work:
    """Return the work to simulate: a step, of two micro-batches under gradient accumulation."""
    clip = {key: value for key, value in request.trainer.items() if key.startswith("gradient_clip")}
    work = Work(
        lambda: _model(request.cfg),
        request.samples.batch,
        request.samples.is_cut,
        batch.micro_batch,
        min(2, batch.accumulation),
        {**clip, **_precision(request.cfg)},
    )
    return work if request.computes else without_step(work)


def _precision(cfg: DictConfig) -> dict[str, Any]:
    """Return the Trainer's arguments for the precision, with bfloat16 in place of float16.

    Both take the same memory, and float16's loss scaling would read values, which simulated tensors don't have.
    """
    asked = cfg.trainer.get("precision")
    same: Any = {"16": "bf16-mixed", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}.get(str(asked), asked)
    cfg = OmegaConf.create({"trainer": {"precision": same}})
    refusals: list[Refused] = []
    arguments = {"precision": cfg.trainer.precision, **plugins(cfg, None, refusals)}
    raise_all(refusals)
    found = arguments["plugins"]
    return {**arguments, "plugins": found if isinstance(found, list) else []}


def _model(cfg: DictConfig) -> LightningModule:
    refusals: list[Refused] = []
    model: LightningModule = instantiated(cfg, "model", refusals)
    raise_all(refusals)
    return model
