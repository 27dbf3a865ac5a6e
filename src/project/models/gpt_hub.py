"""Conversion between the GPT and transformers' GPT-2; with GPT-2's shape, both compute the same numbers.

GPT-2 has queries, keys and values in one matrix, and stores the matrices of linear layers transposed (its Conv1D).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from project.hub import require
from project.models.transformer import Shape


class GPT(Protocol):
    """The attributes of a GPT that the conversion reads."""

    shape: Shape
    vocab_size: int
    context: int
    position: Any
    tied: bool

    def state_dict(self) -> Any: ...


@dataclass(frozen=True)
class Row:
    """A tensor of GPT-2, and the tensors of the GPT that are joined in it along their first dimension."""

    hub: str
    own: tuple[str, ...]
    transposed: bool = False

    def joined(self, state: Mapping[str, Tensor]) -> Tensor:
        tensor = torch.cat([state[name] for name in self.own])
        return tensor.t().contiguous() if self.transposed else tensor

    def cut(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        parts = (tensor.t() if self.transposed else tensor).chunk(len(self.own))
        return zip(self.own, (part.contiguous() for part in parts), strict=True)


def rows(layers: int, tied: bool) -> Iterator[Row]:
    yield Row("transformer.wte.weight", ("tokens.weight",))
    yield Row("transformer.wpe.weight", ("positions.weight",))
    for kind in ("weight", "bias"):
        yield Row(f"transformer.ln_f.{kind}", (f"transformer.norm.{kind}",))
        for layer in range(layers):
            yield from _block(f"transformer.h.{layer}", f"transformer.blocks.{layer}", kind)
    if not tied:
        yield Row("lm_head.weight", ("head.weight",))


def _block(hub: str, own: str, kind: str) -> Iterator[Row]:
    matrix = kind == "weight"
    attention = tuple(f"{own}.attention.{part}.{kind}" for part in ("queries", "keys", "values"))
    yield Row(f"{hub}.ln_1.{kind}", (f"{own}.attention_norm.{kind}",))
    yield Row(f"{hub}.attn.c_attn.{kind}", attention, matrix)
    yield Row(f"{hub}.attn.c_proj.{kind}", (f"{own}.attention.output.{kind}",), matrix)
    yield Row(f"{hub}.ln_2.{kind}", (f"{own}.mlp_norm.{kind}",))
    yield Row(f"{hub}.mlp.c_fc.{kind}", (f"{own}.mlp.input.{kind}",), matrix)
    yield Row(f"{hub}.mlp.c_proj.{kind}", (f"{own}.mlp.output.{kind}",), matrix)


def to_gpt2(model: GPT) -> Any:
    """Return a GPT2LMHeadModel with the same weights and the same logits.

    Raises:
        ValueError: the GPT's shape is not GPT-2's.
        ModuleNotFoundError: transformers is not installed.
    """
    check_shape(model)
    require("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = model.shape
    rates = {name: shape.dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.hidden_width,
        activation_function="gelu",  # exact; OpenAI's weights use an approximation, "gelu_new"
        tie_word_embeddings=model.tied,
        bos_token_id=None,
        eos_token_id=None,
        **rates,
    )
    with torch.device("meta"):
        hub = GPT2LMHeadModel(config)
    state = model.state_dict()
    joined = {row.hub: row.joined(state) for row in rows(shape.layers, model.tied)}
    if model.tied:
        joined["lm_head.weight"] = joined["transformer.wte.weight"]
    hub.load_state_dict(joined, assign=True)
    hub.tie_weights()
    return hub.eval()


def from_gpt2(model: GPT, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a GPT-2, with or without the prefix `transformer.`, under the GPT's names."""
    found = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": weights[name]
        for name in weights
    }
    table = [row for row in rows(model.shape.layers, model.tied) if row.hub in found]
    return {name: part for row in table for name, part in row.cut(found[row.hub])}


def check_shape(model: GPT) -> None:
    shape = model.shape
    needed = {"position": "learned", "norm": "layer", "mlp": "gelu", "bias": True}
    found = {"position": model.position, "norm": shape.norm, "mlp": shape.mlp, "bias": shape.bias}
    if other := [f"{name}={found[name]}" for name in needed if found[name] != needed[name]]:
        raise ValueError(
            f"transformers has no model for a GPT with {', '.join(other)}; GPT-2 has position=learned, norm=layer, "
            "mlp=gelu and bias=true, as model=gpt2"
        )
