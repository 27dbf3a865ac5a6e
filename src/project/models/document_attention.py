"""Attention within documents: by a mask of all pairs of tokens, or by FlexAttention, which skips masked blocks."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def document_mask(ids: Tensor, document_end: int, blocks: bool) -> Tensor | BlockMask:
    """Return the causal mask of `ids` (batch, time) in which a token sees only its own document.

    It is a BlockMask, or without `blocks` a tensor (batch, 1, time, time), which FlashAttention does not support and
    every layer reads.
    """
    ends = (ids == document_end).long()
    document = ends.cumsum(1) - ends  # the end token is part of its document
    if not blocks:
        return (document[:, None, :, None] == document[:, None, None, :]).tril()

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[batch, query] == document[batch, key])

    count, time = ids.shape
    return create_block_mask(is_seen, count, None, time, time, device=ids.device)


def has_blocks(ids: Tensor, head_width: int, dropout: float) -> bool:
    """Return whether FlexAttention (Dong et al. 2024, arXiv:2412.05496) has a kernel: it supports no dropout, and needs
    triton and heads whose width is a power of two."""
    is_power = head_width >= 16 and head_width & (head_width - 1) == 0
    return ids.is_cuda and is_power and not dropout and find_spec("triton") is not None


def attention_by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Return the attention of (batch, heads, time, head), compiled on a GPU, because uncompiled it computes all
    scores."""
    if torch.compiler.is_compiling() or not q.is_cuda:
        y: Tensor = flex_attention(q, k, v, block_mask=mask)
    else:
        y = compiled()(q, k, v, block_mask=mask)
    return y


@cache
def compiled() -> Any:
    return torch.compile(flex_attention)
