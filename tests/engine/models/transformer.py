"""Transformer blocks of torch's own layers, in a form that a tensor-parallel plan can cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, width // heads, causal=causal, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width, dropout, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Counts its heads by width, so that a part of the heads works as well."""

    def __init__(self, width: int, head_width: int, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.head_width, self.causal = head_width, causal
        self.queries = nn.Linear(width, width, bias)
        self.keys = nn.Linear(width, width, bias)
        self.values = nn.Linear(width, width, bias)
        self.output = nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.queries, self.keys, self.values))
        y = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """(batch, time, heads × head) to (batch, heads, time, head)."""
        return torch.unflatten(x, -1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """Drops what it returns, of which each device of a tensor-parallel group has the whole."""

    def __init__(self, width: int, dropout: float, *, bias: bool) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width, bias)
        self.output = nn.Linear(4 * width, width, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.output(gelu(self.input(x))))


class Blocks(nn.Module):
    """The stack, and the last norm."""

    def __init__(self, layers: int, width: int, heads: int, *, causal: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        options = {"causal": causal, "dropout": dropout, "bias": bias}
        self.blocks = nn.ModuleList(Block(width, heads, **options) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """The weights of linear layers and embeddings, which decay, and all else, which does not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            groups[name == "weight" and isinstance(module, nn.Linear | nn.Embedding)].append(parameter)
    return [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}]
