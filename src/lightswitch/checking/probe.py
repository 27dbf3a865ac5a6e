"""Callback that records the state of a run at moments of each step, as digests of its tensors.

A digest is a few sums of a tensor's elements under random signs, in double precision. Digests are linear: those of
shards add up to the whole tensor's, and the difference of two digests is that of the tensors' difference. The mean
square of that estimates its squared norm (Alon, Matias and Szegedy 1996), to about 20 % here. Two tensors with one
differing bit have different digests.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightswitch.batches.seeds import generator_states
from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Piece, Stored, local
from lightswitch.collectives import of_ranks
from lightswitch.hooked_strategy import callbacks_of
from lightswitch.strategies.agreement import Agreement

FILE = "moments.jsonl"
FORWARD, STEPPED, END = 0, 1, 2  # after the forward pass, after the optimizer's step, before the next step
MODEL, OPTIMIZER, LOGGED = "model.", "optimizer.", "logged."  # prefixes of names
LENGTH = 16  # sums in a digest
_ROW, _ROWS = 1024, 4093  # signs repeat after their product, where only exactly opposite differences would cancel
_BLOCK_ROWS = 1024  # rows that are converted to double precision at once

Digest = list[float]  # LENGTH sums of a tensor, or the one value of a metric
Shard = tuple[int, int, Digest]  # first element in the flattened whole tensor, number of elements, digest


class Probe(Callback):
    """Callback that records moments of each step as lines of JSON in ``folder``/moments.jsonl.

    Args:
        folder: folder that rank zero writes to.
        steps: number of steps after which the run is stopped.
        kill_after_step: step at whose end each rank kills itself, once the last checkpoint is written.
        nudge: relative change of the initial weights, to measure the effect of rounding.
    """

    def __init__(self, folder: str, steps: int, kill_after_step: int | None = None, nudge: float = 0.0) -> None:
        self._folder = Path(folder)
        self._steps, self._kill_after_step, self._nudge = steps, kill_after_step, nudge
        self._generators = ""
        self._is_in_forward = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, Agreement):
                callback.ends_runs = False  # differences are to be measured

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.num_training_batches >= self._steps * trainer.accumulate_grad_batches:
            trainer.limit_val_batches = 0  # no epoch ends, so none needs validation metrics
        if self._nudge and trainer.ckpt_path is None:
            _nudge(pl_module, self._nudge)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step, within = divmod(_batch(trainer), trainer.accumulate_grad_batches)
        if not within:
            self._record_end(trainer, pl_module, step)
        self._generators, self._is_in_forward = _generators(pl_module.device), True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        step, within = divmod(_batch(trainer) + 1, trainer.accumulate_grad_batches)
        if within or not self._is_in_forward:  # of several backward passes in a step, the first
            return
        self._is_in_forward = False
        draws = self._generators != _generators(pl_module.device)
        self._record(trainer, (step, FORWARD), _buffers(pl_module), draws=draws)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, within = divmod(_batch(trainer) + 1, trainer.accumulate_grad_batches)
        if within:
            return
        self._record(trainer, (step, STEPPED), {**_state(trainer, pl_module), **_optimizer_states(trainer)})
        if step == self._kill_after_step:
            if isinstance(trainer.strategy, PortableCheckpoints):
                trainer.strategy.wait_for_write()
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= self._steps:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record_end(trainer, pl_module, (_batch(trainer) + 1) // trainer.accumulate_grad_batches)

    def _record_end(self, trainer: Trainer, module: LightningModule, step: int) -> None:
        """Record the state after a step and its hooks, which is the state before the next step. Collective."""
        logged = {f"{LOGGED}{name}": [value.double().item()] for name, value in trainer.callback_metrics.items()}
        parameters = [f"{MODEL}{name}" for name in names.parameters(module)]
        state = {**_state(trainer, module), **_optimizer_states(trainer)}
        self._record(trainer, (step, END), state, logged, parameters=parameters, batch_norms=_batch_norms(module))

    def _record(
        self,
        trainer: Trainer,
        moment: tuple[int, int],
        tensors: Mapping[str, Stored],
        logged: Mapping[str, Digest] | None = None,
        **facts: Any,
    ) -> None:
        ranks = of_ranks(shards(tensors))
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            line = {"moment": moment, "digests": merged(ranks) | dict(logged or {}), **facts}
            with (self._folder / FILE).open("a") as file:
                file.write(json.dumps(line) + "\n")


def _batch(trainer: Trainer) -> int:
    """Return the index of the current micro-batch over all epochs, from 0."""
    return trainer.fit_loop.epoch_loop.total_batch_idx


def _generators(device: torch.device) -> str:
    """Return the states of the generators that a module may draw from."""
    return str([one.tolist() if isinstance(one, Tensor) else one for one in generator_states(device)])


def _state(trainer: Trainer, module: LightningModule) -> dict[str, Stored]:
    """Return this rank's parameters, buffers (persistent or not), and other tensors of the state dict."""
    whole = trainer.strategy.lightning_module_state_dict().items()
    return _buffers(module) | {f"{MODEL}{name}": value for name, value in whole if names.is_stored(value)}


def _buffers(module: nn.Module) -> dict[str, Stored]:
    """Return the buffers, which each rank holds whole at any moment."""
    named = module.named_buffers()
    return {f"{MODEL}{names.own_name(name)}": value for name, value in named if names.is_stored(value)}


def _optimizer_states(trainer: Trainer) -> dict[str, Stored]:
    strategy = trainer.strategy
    if not isinstance(strategy, PortableCheckpoints):
        return {}
    states = (names.tensors_in(strategy.optimizer_state(one)["state"]) for one in trainer.optimizers)
    return {f"{OPTIMIZER}{n}.{name}": value for n, state in enumerate(states) for name, value in state.items()}


def _batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the batch norms whose statistics are those of one device's samples."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [names.own_name(name) for name, part in module.named_modules() if isinstance(part, norms)]


@torch.no_grad()
def _nudge(module: nn.Module, relative: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + relative * signs.to(parameter))


# Digests


@torch.no_grad()
def shards(tensors: Mapping[str, Stored]) -> dict[str, Shard]:
    """Return the digests of this rank's shards of tensors, by name.

    Collective if a DTensor is sharded along another dimension than its first.
    """
    return {name: _shard(tensor) for name, tensor in tensors.items()}


def merged(ranks: Sequence[Mapping[str, Shard]]) -> dict[str, Digest]:
    """Return the digest of each whole tensor, from the first copy of each of its shards."""
    digests: dict[str, Digest] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        held = [rank[name] for rank in reversed(ranks) if name in rank]
        copies = {(first, count): digest for first, count, digest in held if count}
        digests[name] = [math.fsum(sums) for sums in zip(*copies.values(), strict=True)] or [0.0] * LENGTH
    return digests


def norm(digest: Digest) -> float:
    """Return an estimate of the Euclidean norm of a tensor, or the magnitude of a metric."""
    return math.sqrt(math.fsum(value * value for value in digest) / len(digest))


def minus(one: Digest, other: Digest) -> Digest:
    """Return the digest of the difference of two tensors, with 0 for equal sums that are not finite."""
    return [0.0 if a == b or (a != a and b != b) else a - b for a, b in zip(one, other, strict=True)]


def _shard(tensor: Stored) -> Shard:
    held, first = local(tensor), 0
    if isinstance(tensor, Piece):
        first = tensor.first
    elif isinstance(tensor, DTensor):
        (box, *others) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # untyped in torch
        rows = math.prod(tensor.shape[1:])
        if others or tuple(box.sizes[1:]) != tuple(tensor.shape[1:]):  # not contiguous in the flattened tensor
            held = tensor.full_tensor()
        elif tensor.shape:
            first = box.offsets[0] * rows
    return first, held.numel(), _sums(held, first)


def _sums(values: Tensor, first: int) -> Digest:
    """Return the signed sums of elements from index ``first`` on."""
    flat = values.reshape(-1)
    if flat.is_complex():
        flat, first = torch.view_as_real(flat).reshape(-1), 2 * first
    columns, rows = _signs(str(flat.device))
    total = torch.zeros(LENGTH, dtype=torch.float64, device=flat.device)
    at = 0
    while at < flat.numel():
        row, within = divmod(first + at, _ROW)
        count = min(flat.numel() - at, _BLOCK_ROWS * _ROW - within)
        height = -(-(within + count) // _ROW)
        padded = torch.zeros(height * _ROW, dtype=torch.float64, device=flat.device)
        padded[within : within + count] = flat[at : at + count]
        numbers = torch.arange(row, row + height, device=flat.device) % _ROWS
        total += ((padded.view(height, _ROW) @ columns) * rows[numbers]).sum(0)
        at += count
    sums: Digest = total.tolist()
    return sums


@functools.cache
def _signs(device: str) -> tuple[Tensor, Tensor]:
    """Return signs of columns, (_ROW, LENGTH), and of rows, (_ROWS, LENGTH), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    columns, rows = (torch.randint(0, 2, (n, LENGTH), generator=generator) * 2.0 - 1.0 for n in (_ROW, _ROWS))
    return columns.double().to(device), rows.double().to(device)
