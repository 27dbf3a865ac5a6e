"""What to try next, where the memory of a device or a node has run out."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightswitch.batches.plan import BatchPlan
from lightswitch.context import RunContext
from lightswitch.launch import commands
from lightswitch.planning import candidates, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import GIB, Device
from lightswitch.planning.fakes import World

_MOMENTS = 2  # of Adam, as large as the parameters each, where no optimizer has made any yet


def advice(cfg: DictConfig, run: RunContext, batch: BatchPlan, trainer: Trainer) -> str:
    """Return a line on what to try next, with its command, from what this rank's model keeps from step to step."""
    world, device = World(trainer.num_nodes, trainer.num_devices), _device(trainer)
    states, usable = _states(trainer), device.usable_bytes(world.devices_per_node)
    told = f"parameters, gradients and optimizer state are {report.amount(states)} in all, and a device has "
    told += report.amount(usable)
    among = candidates.simplest(run.hydra, world.nodes, world.devices_per_node)
    others = [one for one in among if not (one.offloads and device.kind == "cpu")]
    words = candidates.next_words(states, usable, batch, _strategy(cfg, run, world), others, world)
    if not words:
        return f"next: {told}; use more devices, or larger ones: mode=plan says how many"
    return f"next: {told}; try {commands.instead(cfg, run.placement, list(words))}"


def _device(trainer: Trainer) -> Device:
    at = trainer.strategy.root_device
    if at.type == "cuda":
        return Device("", torch.cuda.get_device_properties(at).total_memory / GIB, {})
    return Device("", psutil.virtual_memory().total / GIB, {}, kind="cpu")


def _states(trainer: Trainer) -> float:
    """Return the bytes of the whole model's states, over all devices."""
    parameters = list(trainer.lightning_module.parameters())
    bytes = sum(getattr(parameter, "ds_numel", parameter.numel()) * parameter.itemsize for parameter in parameters)
    made = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    moments = sum(isinstance(value, torch.Tensor) and value.ndim > 0 for value in made[0].values()) if made else 0
    return bytes * (2 + (moments or _MOMENTS))


def _strategy(cfg: DictConfig, run: RunContext, world: World) -> Candidate:
    """Return the strategy of the run; single or ddp, where strategy=auto has left it at these."""
    node: Any = OmegaConf.to_container(cfg.trainer, resolve=True).get("strategy")  # type: ignore[union-attr]  # a node
    if isinstance(node, dict) and not str(node.get("_target_")).endswith(".auto.auto"):
        return candidates.chosen(run.hydra.runtime.choices.get("strategy"), node)
    cls = "lightswitch.strategies.single.Single" if world.size == 1 else "lightswitch.strategies.ddp.DDP"
    return Candidate((), {"_target_": cls})
