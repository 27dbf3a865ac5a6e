"""Buffers that a module's state leaves out (`persistent=False`) and that training changes, through a resume.

Queues of keys, running means and counters of steps are kept so by many a module; a table that is computed when the
module is made needs no place in a checkpoint, and gets none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.writing import TRANSIENT


class TransientBuffers(Callback):
    """Callback that saves the buffers that have changed since the run began, beside those of the module's state."""

    _at_start: Mapping[str, int] = MappingProxyType({})  # checksums

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # before a checkpoint is read
        self._at_start = {name: _checksum(buffer) for name, buffer in _transient(pl_module).items()}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        buffers = _transient(pl_module)
        changed = {name: one for name, one in buffers.items() if self._at_start.get(name) != _checksum(one)}
        if changed:
            checkpoint[TRANSIENT] = changed

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, PortableCheckpoints):
            return
        saved = strategy.saved(TRANSIENT)
        for name, part, own in _places(pl_module):
            if name not in saved:
                continue
            buffer, value = part.get_buffer(own), saved[name]()
            if buffer.shape == value.shape:
                buffer.copy_(value)  # in its place: ddp and DeepSpeed know the tensor
            else:
                part.register_buffer(own, value.to(buffer.device), persistent=False)


def _transient(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not persistent, by name."""
    return {name: part.get_buffer(own) for name, part, own in _places(module)}


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name of each, the part of the module that has it, and its name there."""
    for prefix, part in module.named_modules():
        for own in sorted(part._non_persistent_buffers_set):
            if part._buffers.get(own) is not None:
                yield names.own_name(f"{prefix}.{own}" if prefix else own), part, own


def _checksum(buffer: Tensor) -> int:
    shape = repr((tuple(buffer.shape), buffer.dtype)).encode()
    return zlib.crc32(buffer.detach().cpu().flatten().view(torch.uint8).numpy().tobytes(), zlib.crc32(shape))
