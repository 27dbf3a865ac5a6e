"""The transformer that the GPT and the vision transformer share.

Every layer with parameters initialises them in its `reset_parameters`, which its constructor calls. So initial values
are the same whether a layer is built on its final device, built on the meta device and filled later, or partitioned as
it is built.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from project.models.document_attention import attention_by_blocks

Mask = Tensor | BlockMask


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a transformer; `mlp_width` None stands for the usual multiple of `width`."""

    layers: int
    heads: int
    width: int
    mlp_width: int | None = None
    dropout: float = 0.0
    norm: Literal["layer", "rms"] = "rms"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = False
    causal: bool = True
    init_std: float = 0.02
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not divide over {self.heads} heads; "
                f"use width={self.heads * math.ceil(self.width / self.heads)} or another number of heads"
            )
        for name, choices in (("norm", ("layer", "rms")), ("mlp", ("gelu", "swiglu"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; use {' or '.join(choices)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; expected 0 or more and less than 1, as in dropout=0.1")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """The MLP's hidden size: 4 × width; with swiglu's third matrix 8/3 × width, rounded up to a multiple of 64, for
        about as many parameters."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.mlp == "gelu" else 64 * math.ceil(8 * self.width / 3 / 64)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of output layers, smaller with depth: each block adds twice to the residual
        stream, whose variance would grow (GPT-2, §2.3)."""
        return self.init_std / math.sqrt(2 * self.layers)


class Transformer(nn.Module):
    """A stack of pre-norm blocks and a final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = norm(shape)

    def forward(self, x: Tensor, rotation: Tensor | None = None, mask: Mask | None = None) -> Tensor:
        """Transform `x` (batch, time, width); a mask (document_attention) replaces the causal mask."""
        for block in self.blocks:
            x = block(x, rotation, mask)
        normed: Tensor = self.norm(x)
        return normed


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = norm(shape)
        self.mlp = MLP(shape)
        self.gradient_checkpointing = shape.gradient_checkpointing

    def forward(self, x: Tensor, rotation: Tensor | None, mask: Mask | None = None) -> Tensor:
        # Inside the block, so that hooks that gather the block's parameters are outside of what is recomputed.
        if self.gradient_checkpointing and torch.is_grad_enabled():
            y: Tensor = checkpoint(self.residual, x, rotation, mask, use_reentrant=False)
            return y
        return self.residual(x, rotation, mask)

    def residual(self, x: Tensor, rotation: Tensor | None, mask: Mask | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Attention(nn.Module):
    """Attention with separate matrices for queries, keys and values.

    The number of heads follows from the width of their outputs, so a module with a shard of the heads works as well.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.queries = Linear(shape.width, shape.width, bias=shape.bias, std=shape.init_std)
        self.keys = Linear(shape.width, shape.width, bias=shape.bias, std=shape.init_std)
        self.values = Linear(shape.width, shape.width, bias=shape.bias, std=shape.init_std)
        self.output = Linear(shape.width, shape.width, bias=shape.bias, std=shape.residual_std)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, rotation: Tensor | None, mask: Mask | None = None) -> Tensor:
        q, k, v = map(self.heads, side_by_side(x, self.queries, self.keys, self.values))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if isinstance(mask, BlockMask):
            y = attention_by_blocks(q, k, v, mask)
        else:
            dropout = self.shape.dropout if self.training else 0.0
            causal = self.shape.causal and mask is None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        z: Tensor = self.dropout(self.output(y.transpose(1, 2).flatten(2)))
        return z

    def heads(self, x: Tensor) -> Tensor:
        """Reshape (batch, time, heads × head) to (batch, heads, time, head)."""
        return torch.unflatten(x, -1, (-1, self.shape.head_width)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden_width
        self.gate = Linear(width, hidden, bias=shape.bias, std=shape.init_std) if shape.mlp == "swiglu" else None
        self.input = Linear(width, hidden, bias=shape.bias, std=shape.init_std)
        self.output = Linear(hidden, width, bias=shape.bias, std=shape.residual_std)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.input(x)) if self.gate is None else F.silu(self.gate(x)) * self.input(x)
        y: Tensor = self.dropout(self.output(hidden))
        return y


class Linear(nn.Linear):
    """Linear layer with normal weights of a given scale and zero biases, in place of torch's uniform ones."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def side_by_side(x: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """Return the outputs of several layers by one matrix product, which reads `x` once and sums its gradient once.

    If a layer has hooks or was replaced, because it is sharded, gathered or adapted, the layers are called one by one.
    """
    if not all(is_plain(layer) for layer in layers):
        return [layer(x) for layer in layers]
    weights: list[Tensor] = [layer.weight for layer in layers]
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    return torch.split(F.linear(x, torch.cat(weights), bias), [layer.out_features for layer in layers], -1)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a call of a layer is only its product."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is Linear and not any(hooks)


class Embedding(nn.Embedding):
    """Embedding with normal weights of a given scale, in place of torch's 1."""

    def __init__(self, entries: int, width: int, *, std: float) -> None:
        self.std = std
        super().__init__(entries, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def norm(shape: Shape) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(shape.width, eps=1e-5)
    return nn.LayerNorm(shape.width, eps=1e-5, bias=shape.bias)


def rotary(time: int, head_width: int, like: Tensor) -> Tensor:
    """Return the rotary position embedding (Su et al. 2021) as cosines and sines: (time, head_width / 2, 2).

    It is computed in each forward pass and not stored in a buffer, so that there is nothing to shard, save or cast to
    16 bits.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=dtype, device=like.device) / head_width)
    angle = torch.outer(torch.arange(time, dtype=dtype, device=like.device), frequency)
    return torch.stack([angle.cos(), angle.sin()], -1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:  # (batch, heads, time, head)
    pairs = torch.unflatten(x.to(rotation.dtype), -1, (-1, 2))
    if torch.compiler.is_compiling():  # torch.compile fuses this into one kernel, and has none for complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    else:  # as complex numbers, which is one operation
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return turned.flatten(-2).to(x.dtype)
