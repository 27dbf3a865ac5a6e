"""Portable checkpoints of FullyShardedDataParallel, whose flat parameters have no names of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from lightswitch.checkpoints import names
from lightswitch.checkpoints.flat_shard import Piece, Stored
from lightswitch.checkpoints.portable import PortableCheckpoints


class PortableFSDP1(PortableCheckpoints):
    """Portable checkpoints of FullyShardedDataParallel: each rank writes and reads its part of the flat parameters.

    torch's own way gathers them, and hangs where parameters are frozen (2.13).
    """

    _root: FullyShardedDataParallel | None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self._root is not None
        pieces, module = _pieces(self._root), self._root.module
        state = names.first_names({names.own_name(name): value for name, value in _state(module)}, module)
        return {name: pieces.get(value, value) if isinstance(value, Tensor) else value for name, value in state.items()}

    def kept_parameters(self) -> dict[str, Stored]:
        assert self._root is not None
        pieces = _pieces(self._root)
        return {
            name: pieces.get(kept, kept) if isinstance(kept, Tensor) else kept
            for name, kept in super().kept_parameters().items()
        }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by parameter names, with numbers as tensors.

        Rank 0, which writes what is not a tensor, may keep nothing of a number's parameter. A rank that keeps nothing
        of a parameter does not step it, so that its number of steps stands still: it leaves that to the others.
        """
        found = super().optimizer_state(optimizer)
        assert self._root is not None
        pieces, parameters = _pieces(self._root), names.parameters(self._root.module)
        for name, values in found["state"].items():
            if (piece := pieces.get(parameters[name])) is not None:
                kept = {key: _kept(value, piece) for key, value in values.items()}
                is_elsewhere = not piece.values.numel() and piece.shape.numel()
                found["state"][name] = {k: v for k, v in kept.items() if isinstance(v, Piece) or not is_elsewhere}
        return found

    def room_for(self, parameter: nn.Parameter, saved: Tensor) -> Tensor | Piece:
        assert self._root is not None
        piece = _pieces(self._root).get(parameter)
        if piece is None or piece.shape != saved.shape:
            return super().room_for(parameter, saved)
        return piece.with_values(torch.zeros_like(piece.values, dtype=saved.dtype))


def handles(root: FullyShardedDataParallel) -> Iterator[tuple[FullyShardedDataParallel, Any]]:
    """Yield each sharded module with the handle that gathers and frees its parameters."""
    for module in FullyShardedDataParallel.fsdp_modules(root):
        if module._handle is not None and module._handle.uses_sharded_strategy:
            yield module, module._handle


def _pieces(root: FullyShardedDataParallel) -> dict[Tensor, Piece]:
    """Return what this rank keeps of each parameter that is sharded."""
    found: dict[Tensor, Piece] = {}
    for _, handle in handles(root):
        flat = handle.flat_param
        kept = getattr(flat, "_local_shard", flat).detach()  # before the first forward pass, they are the same
        for parameter, shape, part in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            begin, elements = (part.offset_in_shard, part.numel_in_shard) if part.in_shard else (0, 0)
            found[parameter] = Piece(kept.narrow(0, begin, elements), shape, part.intra_param_start_idx or 0)
    return found


def _kept(value: Any, piece: Piece) -> Any:
    if isinstance(value, Tensor):
        return piece.with_values(value) if value.shape == piece.values.shape else value
    return torch.as_tensor(value) if isinstance(value, bool | int | float) else value


def _state(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a module's `state_dict` with parameters themselves, without FSDP's hooks, which would gather them."""
    if not any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        yield from module.state_dict(prefix=prefix, keep_vars=True).items()
        return
    own: dict[str, Any] = {}
    module._save_to_state_dict(own, prefix, keep_vars=True)
    yield from own.items()
    for name, child in module.named_children():
        yield from _state(child, f"{prefix}{name}.")
