"""Callback that measures a run of `mode=check`, and stops or kills it."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.checking import digests
from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Stored
from lightswitch.mixins import callbacks_of
from lightswitch.strategies.agreement import Agreement

FILE = "moments.jsonl"
MODULE = "module"
START, FORWARD, BACKWARD, BEFORE_STEP, STEPPED = "start", "forward", "backward", "before_step", "stepped"
MODEL, GRADIENT, OPTIMIZER = "model.", "gradient.", "optimizer."  # prefixes of tensor names
_HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "optimizer_step", "on_before_zero_grad"),
    *("on_train_batch_end", "on_train_epoch_end", "configure_gradient_clipping"),
)


class Probe(Callback):
    """Callback that records the state of a run at certain moments, as lines of JSON in ``folder``/moments.jsonl.

    Args:
        folder: folder that rank zero writes to.
        steps: number of steps after which the run is stopped.
        every_moment: also record moments within a step: after forward, after backward, before and after the optimizer
            step.
        kill_after_step: step at whose end each rank kills itself, once the last checkpoint is written.
        nudge: relative change of the initial weights, to measure the effect of rounding.
    """

    def __init__(
        self,
        folder: str,
        steps: int,
        every_moment: bool = False,
        kill_after_step: int | None = None,
        nudge: float = 0.0,
    ) -> None:
        self._folder = Path(folder)
        self._steps = steps
        self._every_moment = every_moment
        self._kill_after_step = kill_after_step
        self._nudge = nudge
        self._generators: Mapping[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, Agreement):
                callback.only_report()  # differences are to be measured, not to end the run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.num_training_batches >= self._steps * trainer.accumulate_grad_batches:
            patches.replace(trainer, "limit_val_batches", 0)  # no epoch ends, so none needs validation metrics
        if self._nudge and trainer.ckpt_path is None:
            _nudge(pl_module, self._nudge)
        self._write(trainer, {"moment": MODULE, **_described(pl_module)})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if _batch(trainer) % trainer.accumulate_grad_batches == 0:
            self._note_start(trainer, pl_module, _batch(trainer))
        self._generators = generators(pl_module.device)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._every_moment:
            draws = self._generators != generators(pl_module.device)
            self._note(trainer, pl_module, FORWARD, draws=draws, loss=loss.detach().double().item())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._every_moment:
            self._note(trainer, pl_module, BACKWARD, with_gradients=True)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._every_moment:
            self._note(trainer, pl_module, BEFORE_STEP)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._every_moment:
            self._note(trainer, pl_module, STEPPED)
        step, within = divmod(_batch(trainer) + 1, trainer.accumulate_grad_batches)
        if within:
            return
        if step == self._kill_after_step:
            if isinstance(trainer.strategy, PortableCheckpoints):
                trainer.strategy.wait_for_write()
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= self._steps:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_start(trainer, pl_module, _batch(trainer) + 1)

    def _note_start(self, trainer: Trainer, module: LightningModule, batches: int) -> None:
        """Record the state before a step, which is the state after the previous step. Collective."""
        tensors = {f"{MODEL}{name}": value for name, value in _state(trainer, module).items()}
        metrics = {name: value.double().item() for name, value in trainer.callback_metrics.items()}
        self._put(trainer, START, batches, {**tensors, **_optimizer_states(trainer)}, metrics=metrics)

    def _note(
        self, trainer: Trainer, module: LightningModule, moment: str, with_gradients: bool = False, **told: Any
    ) -> None:
        """Record a moment within a step. Collective."""
        tensors = {f"{MODEL}{name}": value for name, value in _state_within_step(trainer, module).items()}
        if with_gradients and trainer.world_size == 1:
            found = names.parameters(module).items()
            tensors |= {f"{GRADIENT}{name}": p.grad for name, p in found if p.grad is not None}
        self._put(trainer, moment, _batch(trainer), tensors, **told)

    def _put(self, trainer: Trainer, moment: str, batches: int, tensors: Mapping[str, Stored], **told: Any) -> None:
        found = digests.gathered(digests.shards(tensors))
        step, micro = divmod(batches, trainer.accumulate_grad_batches)
        line = {"moment": moment, "step": step, "micro": micro, "counted": trainer.global_step, **told}
        self._write(trainer, {**line, "digests": found.digests, "unequal": found.unequal})

    def _write(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / FILE).open("a") as file:
                file.write(json.dumps(line) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the moments that a run has recorded, without a line that is incomplete because the run was killed."""
    path = folder / FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that a module may draw from, by name."""
    _, numbers, position, *_ = np.random.get_state()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": (np.asarray(numbers).tobytes(), position),
        "Python's random": random.getstate(),
    }
    others = {} if device.type == "cpu" else {device.type: torch.get_device_module(device).get_rng_state().tolist()}
    return found | others


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the batch norms whose statistics are those of one device's samples."""
    parts = ((name, part) for name, part in module.named_modules() if not isinstance(part, nn.SyncBatchNorm))
    return [names.own_name(name) for name, part in parts if isinstance(part, _BatchNorm)]


def _batch(trainer: Trainer) -> int:
    """Return the index of the current micro-batch over all epochs, from 0."""
    return trainer.fit_loop.epoch_loop.total_batch_idx


def _state(trainer: Trainer, module: LightningModule) -> dict[str, Stored]:
    """Return this rank's parameters, buffers (persistent or not), and other tensors of the state dict."""
    strategy = trainer.strategy
    whole = strategy.lightning_module_state_dict()
    found = {name: value for name, value in whole.items() if names.is_stored(value)}
    return {**{names.own_name(name): buffer for name, buffer in module.named_buffers()}, **found}


def _state_within_step(trainer: Trainer, module: LightningModule) -> dict[str, Stored]:
    """Return the state if each rank holds all of it; else only buffers, as parameters are sharded in a step."""
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return _state(trainer, module)
    found: dict[str, Stored] = {names.own_name(name): buffer for name, buffer in module.named_buffers()}
    held = strategy.local_parameters() if isinstance(strategy, PortableCheckpoints) else {}
    if all(type(value) is nn.Parameter for value in held.values()):
        found |= held
    return found


def _optimizer_states(trainer: Trainer) -> dict[str, Stored]:
    strategy = trainer.strategy
    if not isinstance(strategy, PortableCheckpoints):
        return {}
    states = (names.tensors_in(strategy.optimizer_state(one)["state"]) for one in trainer.optimizers)
    return {f"{OPTIMIZER}{n}.{name}": value for n, state in enumerate(states) for name, value in state.items()}


@torch.no_grad()
def _nudge(module: nn.Module, relative: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + relative * signs.to(parameter))


def _described(module: LightningModule) -> dict[str, Any]:
    hooks = [name for name in _HOOKS if is_overridden(name, module)]
    facts = {"class": type(module).__name__, "hooks": hooks, "batch_norms": batch_norms(module)}
    return {**facts, "parameters": list(names.parameters(module))}
