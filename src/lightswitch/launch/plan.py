"""The plan of a run: its memory and time under each strategy, estimated before it starts.

One step of one device is simulated for all strategies that compute alike; the rest is arithmetic.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.batches.plan import BatchPlan
from lightswitch.config.hydra_versions import instantiate
from lightswitch.context import RunContext
from lightswitch.errors import Refused, RefusedRequest, Unplanned, shown
from lightswitch.failures.classify import full_traceback, one_line
from lightswitch.launch import commands
from lightswitch.launch.build import instantiated, plugins, raise_all, shards_itself
from lightswitch.planning import candidates, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import Device, World, precision_problems
from lightswitch.planning.estimate import Estimate, Run, estimate, holding
from lightswitch.planning.simulation import Samples, Simulation, Work, first_samples, simulate
from lightswitch.preflight import devices, strategies
from lightswitch.strategies.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A requested run, and the devices for which it is estimated."""

    cfg: DictConfig
    device: Device
    world: World
    samples: Samples
    simulated: dict[str, Simulation] = field(default_factory=dict)  # by what they depend on

    @property
    def trainer(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        plain: Any = OmegaConf.to_container(self.cfg.trainer, resolve=True)
        return dict(plain)


def requested(cfg: DictConfig, prepares_data: bool = True) -> Request:
    """Return the run that a config requests, on the device that its `plan` node names.

    Args:
        prepares_data: whether to prepare the data; False if other processes of the run may do it at the same time.

    Raises:
        Refused: there is no training data, or a constructor rejects its arguments.
        Unplanned: user code has failed to load the training data.
    """
    refusals: list[Refused] = []
    data: LightningDataModule | None = instantiated(cfg, "data", refusals)
    model = instantiated(cfg, "model", refusals) if data is None else None
    raise_all(refusals)
    owner = model if model is not None else LightningModule()
    with _own_code("loading the training data"):
        samples = first_samples(owner, data, not shards_itself(cfg), prepares_data)
    return Request(cfg, device_of(cfg), world_of(cfg), samples)


def device_of(cfg: DictConfig) -> Device:
    """Return the device that the config's `plan` node names, with its memory."""
    device: Device = instantiate(cfg.plan.device)
    return device.with_memory(cfg.plan.memory_gib)


def world_of(cfg: DictConfig) -> World:
    """Return the number of nodes, and of devices on each, of the run."""
    plain: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    return World(plain["num_nodes"], devices.count(plain))


def parameter_bytes(cfg: DictConfig) -> float:
    """Return the bytes of the model's parameters in the run's precision.

    The model is built on the meta device, which takes no memory.

    Raises:
        Unplanned: it can't be built there.
    """
    model = _on_meta_device(cfg)
    in_16_bits = str(cfg.trainer.get("precision")) in ("16-true", "bf16-true")
    return sum(parameter.numel() * (2 if in_16_bits else parameter.itemsize) for parameter in model.parameters())


def _on_meta_device(cfg: DictConfig) -> LightningModule:
    with _own_code("building the model"), torch.device("meta"):
        model = _model(cfg)
        model.configure_model()
    return model


def fitted(request: Request, candidate: Candidate) -> Estimate:
    """Return the estimate at the configured micro-batch, or at the largest that fits if none is configured.

    The largest is extrapolated from the simulated step of a device's whole share; `confirmed` simulates it.

    Raises:
        Unplanned: a step can't be simulated.
        Refused: the strategy, or the module, doesn't support the run.
    """
    batch = batch_of(request, candidate, request.cfg.micro_batch_size)
    check(request, candidate, batch)
    share = batch.micro_batch // candidate.ranks_of_a_sample  # of a strategy that splits no layers
    is_simulated = request.samples.is_cut and _key(candidate, share) in request.simulated
    simulated = share if is_simulated else batch.micro_batch
    found = at(request, candidate, batch, simulated)
    if found.memory.fits or request.cfg.micro_batch_size is not None or not found.largest_micro_batch:
        return found
    return _largest_that_fits(request, candidate, _smaller(batch), simulated)


def confirmed(request: Request, found: Estimate, among: Sequence[Candidate]) -> Estimate:
    """Return an estimate with its step simulated if it was extrapolated, at a smaller micro-batch if necessary."""
    candidate = next(one for one in among if one.words == found.words)
    is_simulated = _key(candidate, found.run.micro_batch) in request.simulated
    if is_simulated or request.cfg.micro_batch_size is not None:
        return found
    batch = batch_of(request, candidate, found.run.micro_batch)
    confirmed = _largest_that_fits(request, candidate, [batch.micro_batch, *_smaller(batch)], None)
    return replace(confirmed, largest_micro_batch=found.largest_micro_batch)


def _largest_that_fits(request: Request, candidate: Candidate, sizes: Sequence[int], simulated: int | None) -> Estimate:
    """Return the estimate at the first micro-batch that fits, or at the last.

    Args:
        simulated: the micro-batch from which the others are extrapolated; None to simulate each.
    """
    for micro in sizes:
        found = at(request, candidate, batch_of(request, candidate, micro), simulated)
        if found.memory.fits:
            break
    return found


def words_of(found: Estimate) -> list[str]:
    """Return the overrides that choose an estimate's strategy and micro-batch."""
    micro = [f"micro_batch_size={found.run.micro_batch}"] if found.run.accumulation > 1 else []
    return [*found.words, *micro]


def batch_of(request: Request, candidate: Candidate, micro: int | None) -> BatchPlan:
    """Return how a strategy divides the global batch into micro-batches."""
    replicas = max(1, request.world.size // candidate.ranks_of_a_sample)
    return BatchPlan.derive(request.cfg.global_batch_size, micro, replicas)


def _smaller(batch: BatchPlan) -> list[int]:
    """Return the smaller micro-batches that divide a device's share of the global batch, the largest first."""
    share = batch.micro_batch * batch.accumulation
    return [size for size in range(batch.micro_batch - 1, 0, -1) if share % size == 0]


def check(request: Request, candidate: Candidate, batch: BatchPlan) -> None:
    """Check that the strategy and the precision support the run, as far as this is known before a start.

    Raises:
        RefusedRequest: they don't; the error has each reason.
    """
    plain: Any = OmegaConf.to_container(request.cfg, resolve=True)
    kind, world = request.device.kind, request.world
    asked = strategies.Request(
        dict(candidate.node), plain["model"], plain["trainer"], world.nodes, world.devices_per_node, kind,
        (batch.global_batch, batch.micro_batch),
    )  # fmt: skip
    plain["trainer"]["strategy"] = candidate.node
    problems = [*strategies.problems(asked), *strategies.precision_problems(plain, kind)]
    problems += precision_problems(str(request.cfg.trainer.get("precision")), request.device)
    if problems:
        raise RefusedRequest(problems)


def at(request: Request, candidate: Candidate, batch: BatchPlan, simulated: int | None = None) -> Estimate:
    """Return the estimate at a micro-batch.

    Args:
        simulated: the micro-batch that is simulated; None for the same.
    """
    cfg, world, precision = request.cfg, request.world, str(request.cfg.trainer.get("precision"))
    strategy = strategy_of(candidate)
    step, steps = _step(request, candidate, strategy, simulated or batch.micro_batch), cfg.trainer.get("max_steps")
    run = Run(
        batch.micro_batch, batch.accumulation, world, precision, cfg.matmul_precision,
        steps if steps and steps > 0 else None, cfg.plan.tokens_per_sample,
        batch.global_batch,
    )  # fmt: skip
    held = holding(step, strategy, world, not request.device.is_host, precision)
    return estimate(candidate.words, step, held, run, request.device)


def strategy_of(candidate: Candidate) -> Strategy:
    """Return the strategy, which checks its arguments."""
    strategy: Strategy = instantiate(dict(candidate.node))
    return strategy


def _step(request: Request, candidate: Candidate, strategy: Strategy, samples: int) -> Simulation:
    """Simulate a step of one device, once for all strategies that compute alike."""
    split = _split(_on_meta_device(request.cfg), strategy) if isinstance(strategy, TensorParallel) else []
    key, given, node = _key(candidate, samples), request.samples, candidate.node
    if key not in request.simulated:
        with _own_code("a step of the model"):
            precision = _precision(request.cfg.trainer.get("precision"))
            units, recomputes = node.get("units"), bool(node.get("activation_checkpointing"))
            model = partial(_model, request.cfg)
            work = Work(model, given.batch, given.is_cut, samples, precision, units, recomputes)
            request.simulated[key] = simulate(work)
    return replace(request.simulated[key], split=split)


def _key(candidate: Candidate, samples: int) -> str:
    """Return what a request's simulated step depends on, as the key of `Request.simulated`."""
    return repr((samples, candidate.node.get("units"), bool(candidate.node.get("activation_checkpointing"))))


def _split(model: LightningModule, strategy: TensorParallel) -> list[str]:
    """Return the paths of the parameters whose layers a strategy splits."""
    patterns = strategy.styles_of(model)
    layers = [(path, one) for path, one in model.named_modules() if any(fnmatchcase(path, own) for own in patterns)]
    return [f"{path}.{name}" for path, layer in layers for name, _ in layer.named_parameters()]


@contextmanager
def _own_code(what: str) -> Iterator[None]:
    """Context manager that reports an error of user code in one line.

    Raises:
        Unplanned: the code has failed.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Unplanned([f"{what} fails: {one_line(error)}"], full_traceback(error)) from error


def _precision(asked: Any) -> dict[str, Any]:
    """Return the Trainer's arguments for the precision, with bfloat16 in place of float16.

    Both take the same memory, and float16's loss scaling would read values, which simulated tensors don't have.
    """
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


def plan(cfg: DictConfig, run: RunContext) -> None:
    """Log a table of the strategies, and the recommended one with its command; write plan.json.

    Raises:
        Refused: there is no training data, no strategy supports the run, or a step can't be simulated.
    """
    request = requested(cfg)
    among = _candidates(request, run)
    estimates: list[Estimate] = []
    refused: dict[str, str] = {}
    for candidate in among:
        try:
            estimates.append(found := fitted(request, candidate))
            is_whole = found.memory.fits and found.run.accumulation == 1
            if not is_whole and (other := candidate.recomputing()) is not None:
                estimates.append(fitted(request, other))
        except Unplanned:
            raise
        except Refused as refusal:
            refused[candidate.name] = str(refusal)
    if not estimates:
        lines = [why.splitlines() for why in refused.values()]
        shared = [line for line in lines[0] if all(line in others for others in lines)]
        raise RefusedRequest(shared or dict.fromkeys(line for each in lines for line in each))
    among += [other for one in among if (other := one.recomputing()) is not None]
    best, *others = report.ordered(estimates)
    estimates = report.ordered([confirmed(request, best, among), *others])
    _report(run, request, estimates, refused)


def _candidates(request: Request, run: RunContext) -> list[Candidate]:
    """Return the configured strategy, or all for strategy=auto."""
    choice = run.hydra.runtime.choices.get("strategy")
    if choice == "auto":
        return candidates.every(run.hydra, request.world.nodes, with_zero=request.cfg.plan.deepspeed)
    return [candidates.chosen(choice, request.trainer["strategy"])]


def _report(run: RunContext, request: Request, estimates: list[Estimate], refused: Mapping[str, str]) -> None:
    log.info("\n%s\n", report.table(estimates))
    for name, why in refused.items():
        log.info("left out   %s: %s", name, why.replace("\n", "; "))
    log.info("take       %s", report.answer(estimates[0], request.device))
    for about, message in report.details(estimates[0]):
        log.info("%-10s %s", about, message)
    log.info("start      %s", commands.planned(run.placement, words_of(estimates[0])))
    path = run.run_dir / "plan.json"
    strategies = [report.as_data(one) for one in estimates]
    data = {"device": asdict(request.device), "strategies": strategies, "refused": refused}
    regular_files.write_text(path, json.dumps(data, indent=1))
    log.info("plan       %s", shown(path))
