"""Conversion between the GPT and transformers' GPT-2 or Llama; with their shape, both compute the same numbers.

GPT-2 has queries, keys and values in one matrix, and stores the matrices of linear layers transposed (its Conv1D).
Llama rotates the first half of a head with the second, and the GPT each number with its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from project.hub import require
from project.models.transformer import Shape

GPT2 = {"position": "learned", "norm": "layer", "mlp": "gelu", "bias": True}
LLAMA = {"position": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False}


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
    """A tensor of the hub, and the tensors of the GPT that are joined in it along their first dimension.

    `rotated_heads` is the number of heads whose rows are in another order, because the model rotates them; else 0.
    """

    hub: str
    own: tuple[str, ...]
    transposed: bool = False
    rotated_heads: int = 0

    def joined(self, state: Mapping[str, Tensor]) -> Tensor:
        tensor = torch.cat([state[name] for name in self.own])
        if self.rotated_heads:  # pairs of neighbours to halves
            pairs = torch.unflatten(tensor, 0, (self.rotated_heads, -1, 2))  # (heads, pairs, 2, width)
            tensor = pairs.transpose(1, 2).flatten(0, 2)
        return (tensor.t() if self.transposed else tensor).contiguous()

    def cut(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.rotated_heads:
            halves = torch.unflatten(tensor, 0, (self.rotated_heads, 2, -1))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        parts = (tensor.t() if self.transposed else tensor).chunk(len(self.own))
        return zip(self.own, (part.contiguous() for part in parts), strict=True)


def llama_rows(shape: Shape, tied: bool) -> Iterator[Row]:
    yield Row("model.embed_tokens.weight", ("tokens.weight",))
    yield Row("model.norm.weight", ("transformer.norm.weight",))
    names = {
        "attention.values": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
    }
    names |= {"mlp.input": "mlp.up_proj", "mlp.output": "mlp.down_proj"}
    names |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for layer in range(shape.layers):
        hub, own = f"model.layers.{layer}", f"transformer.blocks.{layer}"
        for part, there in (("queries", "q_proj"), ("keys", "k_proj")):
            names_of_part = f"{hub}.self_attn.{there}.weight", (f"{own}.attention.{part}.weight",)
            yield Row(*names_of_part, rotated_heads=shape.heads)
        for part, there in names.items():
            yield Row(f"{hub}.{there}.weight", (f"{own}.{part}.weight",))
    if not tied:
        yield Row("lm_head.weight", ("head.weight",))


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


def to_hub(model: GPT) -> Any:
    """Return a GPT2LMHeadModel or LlamaForCausalLM with the same weights and the same logits.

    Raises:
        ValueError: the GPT's shape is neither GPT-2's nor Llama's.
        ModuleNotFoundError: transformers is not installed.
    """
    is_llama = differing(model, LLAMA) == []
    if not is_llama and (other := differing(model, GPT2)):
        raise ValueError(
            f"transformers has no model for a GPT with {', '.join(other)}; GPT-2 has position=learned, norm=layer, "
            "mlp=gelu and bias=true, as model=gpt2; Llama has rotary, rms, swiglu and bias=false, as model=gpt_7b"
        )
    require("transformers")
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    with torch.device("meta"):
        hub: Any = LlamaForCausalLM(llama_config(model)) if is_llama else GPT2LMHeadModel(gpt2_config(model))
    state = model.state_dict()
    table = llama_rows(model.shape, model.tied) if is_llama else rows(model.shape.layers, model.tied)
    joined = {row.hub: row.joined(state) for row in table}
    if model.tied:
        joined["lm_head.weight"] = state["tokens.weight"]
    hub.load_state_dict(joined, assign=True)
    if is_llama:  # its rotation's frequencies are a buffer, which no state dict has
        hub.model.rotary_emb = type(hub.model.rotary_emb)(hub.config)
    hub.tie_weights()
    return hub.eval()


def llama_config(model: GPT) -> Any:
    from transformers import LlamaConfig

    shape = model.shape
    return LlamaConfig(
        vocab_size=model.vocab_size,
        max_position_embeddings=model.context,
        hidden_size=shape.width,
        intermediate_size=shape.hidden_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        attention_dropout=shape.dropout,
        rms_norm_eps=1e-5,
        tie_word_embeddings=model.tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def gpt2_config(model: GPT) -> Any:
    from transformers import GPT2Config

    shape = model.shape
    rates = {name: shape.dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    return GPT2Config(
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


def from_hub(model: GPT, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a Llama or GPT-2, with or without its prefix, under the GPT's names."""
    is_llama = differing(model, LLAMA) == []
    prefix = "model." if is_llama else "transformer."
    found = {name if name.startswith((prefix, "lm_head.")) else f"{prefix}{name}": weights[name] for name in weights}
    table = llama_rows(model.shape, model.tied) if is_llama else rows(model.shape.layers, model.tied)
    return {name: part for row in table if row.hub in found for name, part in row.cut(found[row.hub])}


def differing(model: GPT, needed: Mapping[str, object]) -> list[str]:
    """Return the options, as NAME=VALUE, in which a GPT has another shape."""
    shape = model.shape
    found = {"position": model.position, "norm": shape.norm, "mlp": shape.mlp, "bias": shape.bias}
    return [f"{name}={found[name]}" for name in needed if found[name] != needed[name]]
