"""Attention inside of documents: by a mask of all pairs of tokens, or by FlexAttention, which skips what is masked."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def document_mask(ids: Tensor, document_end: int, blocks: bool) -> Tensor | BlockMask:
    """Which tokens are before another, or are it, and in its document, for `ids` (batch, time).

    Without `blocks`, (batch, 1, time, time); FlashAttention takes none, and every layer reads it.
    """
    ends = (ids == document_end).long()
    document = ends.cumsum(1) - ends  # the token that ends one is of it
    if not blocks:
        return (document[:, None, :, None] == document[:, None, None, :]).tril()

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[batch, query] == document[batch, key])

    count, time = ids.shape
    return create_block_mask(is_seen, count, None, time, time, device=ids.device)


def has_blocks(ids: Tensor, head_width: int, dropout: float) -> bool:
    """Whether FlexAttention (Dong et al. 2024, arXiv:2412.05496) has a kernel: it drops nothing, and is built by triton
    for heads of a power of two."""
    is_power = head_width >= 16 and head_width & (head_width - 1) == 0
    return ids.is_cuda and is_power and not dropout and find_spec("triton") is not None


def attention_by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attention of (batch, heads, time, head), compiled on a GPU; as it stands it would make all scores."""
    if torch.compiler.is_compiling() or not q.is_cuda:
        y: Tensor = flex_attention(q, k, v, block_mask=mask)
    else:
        y = compiled()(q, k, v, block_mask=mask)
    return y


@cache
def compiled() -> Any:
    return torch.compile(flex_attention)
