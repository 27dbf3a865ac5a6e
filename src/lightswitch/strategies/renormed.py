"""Embeddings with `max_norm`, whose forward pass scales the rows that it reads: those of all ranks, as in one process.

torch scales the rows that a rank's samples read, in that rank's copy of the weight alone, so copies would differ.
A file of its own, because ddp, fsdp and DeepSpeed import it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.strategies.writes import Looks


def renorm_over_ranks(module: nn.Module, looks: Looks) -> None:
    """Let the forward pass of each embedding with `max_norm` scale the rows that any rank reads in it.

    Args:
        module: module of the run, or one that contains it.
        looks: record of the training steps that are examined for writes, which learns what these write.
    """
    found = {
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
    }
    for part in found:
        for hook in [*part._forward_hooks.values()]:  # of an earlier call: the strategy's own hooks have to come first
            if isinstance(before := getattr(hook, "__self__", None), _Renorm):
                before.remove()
        _Renorm(part)
    looks.expect({name for name, one in names.parameters(module).items() if any(one is part.weight for part in found)})


class _Renorm:
    """Hooks around an embedding's forward pass, which scale rows instead of the pass itself."""

    def __init__(self, embedding: nn.Embedding | nn.EmbeddingBag) -> None:
        self._max_norm: float | None = None
        self._handles = (
            embedding.register_forward_pre_hook(self.begin, with_kwargs=True),
            embedding.register_forward_hook(self.end, always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def begin(self, embedding: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Scale the rows that any rank reads. Collective: ranks call a module equally often."""
        self._max_norm = embedding.max_norm
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1 or detect_fake_mode() is not None
        if is_alone or self._max_norm is None:
            return
        rows = args[0] if args else kwargs["input"]
        reads = torch.zeros(embedding.num_embeddings, dtype=torch.uint8, device=rows.device)
        reads[rows.flatten()] = 1
        dist.all_reduce(reads, dist.ReduceOp.MAX)
        torch.embedding_renorm_(
            embedding.weight.detach(), reads.nonzero().flatten(), self._max_norm, embedding.norm_type
        )
        patches.replace(embedding, "max_norm", None)

    def end(self, embedding: Any, *_: Any) -> None:
        patches.replace(embedding, "max_norm", self._max_norm)
