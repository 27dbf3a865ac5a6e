"""A decoder-only transformer for language modelling over windows of token ids."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from project.models.cross_entropy import LinearCrossEntropy
from project.models.document_attention import document_mask, has_blocks
from project.models.gpt_hub import from_hub, to_hub
from project.models.language_model import PADDING, Batch, LanguageModel
from project.models.transformer import Embedding, Linear, Mask, Shape, Transformer, rotary
from project.optimizer import OptimizerFactory, SchedulerFactory


class GPT(LanguageModel):
    """Decoder-only transformer with current defaults; `conf/model/gpt2.yaml` sets those of GPT-2.

    Args:
        vocab_size: number of token ids.
        layers: number of blocks of attention and MLP.
        heads: number of attention heads, which divides the width.
        width: size of a token's vector.
        mlp_width: size of the MLP's hidden layer; None for four times the width, or as many parameters under swiglu.
        dropout: fraction of values dropped in training, from 0 to 1.
        norm: layer has a mean and a bias, rms has neither.
        position: learned vectors for each position, or rotary angles in attention.
        mlp: gelu, or the gated swiglu.
        bias: whether linear layers have a bias.
        tied: whether the head shares its weight with the token embedding.
        init_std: standard deviation of the initial weights.
        gradient_checkpointing: recompute a block's activations in the backward pass instead of storing them.
        document_end: the id that ends a document, so that a token attends only to its own document; None to attend to
            all.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        mlp_width: int | None = None,
        dropout: float = 0.0,
        norm: Literal["layer", "rms"] = "layer",
        position: Literal["learned", "rotary"] = "rotary",
        mlp: Literal["gelu", "swiglu"] = "swiglu",
        bias: bool = False,
        tied: bool = True,
        init_std: float = 0.02,
        gradient_checkpointing: bool = False,
        sample_tokens: int = 256,
        document_end: int | None = None,
    ) -> None:
        super().__init__(context, optimizer, scheduler, sample_tokens)
        self.shape = Shape(
            layers=layers,
            heads=heads,
            width=width,
            mlp_width=mlp_width,
            dropout=dropout,
            norm=norm,
            mlp=mlp,
            bias=bias,
            init_std=init_std,
            gradient_checkpointing=gradient_checkpointing,
        )
        check_sizes(self.shape, vocab_size, context, position)
        self.vocab_size = vocab_size
        self.position, self.tied = position, tied
        self.document_end = document_end

    def configure_model(self) -> None:
        """Create the layers here, so that a strategy can shard them, and no process has to hold the whole of a large
        model."""
        if hasattr(self, "transformer"):
            return
        width, std = self.shape.width, self.shape.init_std
        self.tokens = Embedding(self.vocab_size, width, std=std)
        self.positions = Embedding(self.context, width, std=std) if self.position == "learned" else None
        self.dropout = nn.Dropout(self.shape.dropout)
        self.transformer = Transformer(self.shape)
        # A tied head is not a module: it is one parameter under one name, however it is moved or sharded.
        self.head = None if self.tied else Linear(width, self.vocab_size, bias=False, std=std)
        self.cross_entropy = LinearCrossEntropy(ignore_index=PADDING)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, time, vocab) of token ids (batch, time), time ≤ context; with targets, the mean
        loss."""
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"found a batch of {ids.dtype} of shape {tuple(ids.shape)}; expected token ids (batch, time), "
                "as from data=python_source, text or text_shards"
            )
        time = ids.shape[1]
        if time > self.context:
            raise ValueError(
                f"found a window of {time} tokens, but the model's context is {self.context}; "
                f"set data.context={self.context} or model.context={time}"
            )
        x, rotation = self.tokens(ids), None
        if self.positions is not None:
            x = x + self.positions(torch.arange(time, device=ids.device))
        else:
            rotation = rotary(time, self.shape.head_width, like=x)
        mask: Mask | None = None
        if self.document_end is not None:
            # generated text grows with each token, and a kernel would be built for each length
            blocks = self.training and has_blocks(ids, self.shape.head_width, self.shape.dropout)
            mask = document_mask(ids, self.document_end, blocks)
        x = self.transformer(self.dropout(x), rotation, mask)
        head = self.tokens if self.head is None else self.head
        if targets is not None:
            loss: Tensor = self.cross_entropy(x, head.weight, targets)
            return loss
        return F.linear(x, head.weight) if head is self.tokens else head(x)

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self(*batch)
        return loss

    def to_hf(self) -> list[Any]:
        """Return transformers' GPT-2 or Llama with these weights. Raises ValueError for a shape of neither."""
        return [to_hub(self)]

    def from_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a GPT-2 or Llama from the hub under the names of this model."""
        return from_hub(self, weights)


def check_sizes(shape: Shape, vocab_size: int, context: int, position: str) -> None:
    for name, size in (("vocab_size", vocab_size), ("context", context)):
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")
    if position not in ("learned", "rotary"):
        raise ValueError(f"position is {position!r}; use learned or rotary")
    if position == "rotary" and shape.head_width % 2:
        raise ValueError(
            f"rotary positions rotate pairs of numbers, but a head has {shape.head_width} (width {shape.width} / "
            f"heads {shape.heads}); use width={shape.width + shape.heads}, or position=learned"
        )
