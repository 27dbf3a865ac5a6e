"""A decoder-only transformer: language modelling over windows of token ids."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from project.models.cross_entropy import LinearCrossEntropy
from project.models.document_attention import document_mask, has_blocks
from project.models.gpt_hub import from_gpt2, to_gpt2
from project.models.language_model import PADDING, Batch, LanguageModel
from project.models.transformer import Embedding, Linear, Mask, Shape, Transformer, rotary
from project.optimizer import OptimizerFactory, SchedulerFactory


class GPT(LanguageModel):
    """The defaults are today's; `conf/model/gpt2.yaml` names GPT-2's.

    Args:
        vocab_size: how many token ids there are.
        layers: blocks of attention and MLP.
        heads: of attention; the width divides over them.
        width: of a token's vector.
        mlp_width: of the hidden layer; None for four times the width, or as many parameters under swiglu.
        dropout: the share that is dropped in training, from 0 to 1.
        norm: layer has a mean and a bias, rms has neither.
        position: learned vectors for each place, or rotary angles in attention.
        mlp: gelu, or swiglu, which is gated.
        bias: whether linear layers have one.
        tied: whether the head is the embedding of the tokens.
        init_std: standard deviation of the initial weights.
        gradient_checkpointing: compute a block's activations again in the backward pass instead of keeping them.
        document_end: the id that ends a document, so that a token attends to its own document alone; None for all.
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
        """Layers are made here, where a strategy can spread them, so that a large model never is in every process."""
        if hasattr(self, "transformer"):
            return
        width, std = self.shape.width, self.shape.init_std
        self.tokens = Embedding(self.vocab_size, width, std=std)
        self.positions = Embedding(self.context, width, std=std) if self.position == "learned" else None
        self.dropout = nn.Dropout(self.shape.dropout)
        self.transformer = Transformer(self.shape)
        # A tied head has no module of its own: one parameter under one name, whatever moves or shards it.
        self.head = None if self.tied else Linear(width, self.vocab_size, bias=False, std=std)
        self.cross_entropy = LinearCrossEntropy(ignore_index=PADDING)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Token ids (batch, time), time ≤ context, to logits (batch, time, vocab); with targets, to their mean loss."""
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"found a batch of {ids.dtype} of shape {tuple(ids.shape)}; expected token ids (batch, time), "
                "as data=python_source, text and text_shards have them"
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
            # a text that is generated has another length with each token, for which each a kernel would be built
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
        """The GPT-2 of transformers with these weights. Raises ValueError where the shape is not GPT-2's."""
        return [to_gpt2(self)]

    def from_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a GPT-2 of the hub under the names of this model."""
        return from_gpt2(self, weights)


def check_sizes(shape: Shape, vocab_size: int, context: int, position: str) -> None:
    for name, size in (("vocab_size", vocab_size), ("context", context)):
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")
    if position not in ("learned", "rotary"):
        raise ValueError(f"position is {position!r}; use learned or rotary")
    if position == "rotary" and shape.head_width % 2:
        raise ValueError(
            f"rotary positions turn pairs of numbers, but a head has {shape.head_width} (width {shape.width} / "
            f"heads {shape.heads}); use width={shape.width + shape.heads}, or position=learned"
        )
