"""Tensor-parallel plan of a transformers model, from the plan that transformers has for it."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from project.models.hf_causal_lm import HFCausalLM


def gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def split() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


def summed() -> ParallelStyle:
    """Return the style of a norm over single heads: each device applies the whole norm to its heads, so gradients are
    summed.

    To torch, the heads are shards of a sequence, which may be in any dimension but the last.
    """
    return SequenceParallel(sequence_dim=1, use_local_output=True)


# torch's styles by transformers' names, and which layer of an adapter is sharded like the layer that it adapts
STYLES: dict[str, tuple[Callable[[], ParallelStyle], str]] = {
    "colwise": (ColwiseParallel, "lora_B"),
    "colwise_gather_output": (gathered, "lora_B"),
    "colwise_rep": (gathered, "lora_B"),  # the same, in older versions of transformers
    "rowwise": (RowwiseParallel, "lora_A"),
    "rowwise_split_input": (split, "lora_A"),
    "replicated_with_grad_allreduce": (summed, ""),
}
OF_EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")  # not sharded
COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def tensor_parallel(model: HFCausalLM, devices: int) -> dict[str, ParallelStyle]:
    """Return styles by the paths of layers, from `tp_plan` of the transformers model.

    Raises:
        ValueError: it has none, or one that torch's styles can't express; or heads or hidden units do not divide over
            the devices; or its adapters are DoRA's.
    """
    if model.adapters is not None and model.adapters.use_dora:
        raise ValueError("DoRA needs the norms of whole layers, but each device has only a shard; use strategy=fsdp")
    names = dict(styled(model.model))
    check(model.model, names, devices)
    plan: dict[str, ParallelStyle] = {}
    for path, name in names.items():
        style, adapter = STYLES[name]
        layer: Any = model.model.get_submodule(path)
        parts = ["base_layer", *(f"{adapter}.{inner}" for inner in layer.lora_A)] if hasattr(layer, "lora_A") else []
        plan |= {f"model.{path}.{part}".rstrip("."): style() for part in parts or [""]}
    return plan


def styled(hub: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path of each layer and the name of its style in transformers, without embeddings and tied heads."""
    plan: dict[str, str] = getattr(hub, "tp_plan", None) or {}
    embedding = hub.get_input_embeddings().weight  # type: ignore[operator]  # a method of every transformers model
    for path, layer in hub.named_modules():
        name = plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", path))
        if name is not None and name not in OF_EMBEDDINGS and getattr(layer, "weight", None) is not embedding:
            yield path, name


def check(hub: nn.Module, names: dict[str, str], devices: int) -> None:
    kind = type(hub).__name__
    if not names:
        raise ValueError(f"transformers has no tensor-parallel plan for {kind}; use strategy=fsdp")
    for path, name in names.items():
        if name not in STYLES:
            raise ValueError(
                f"transformers' plan for {kind} has {path} as {name}, which is not a style of torch; use strategy=fsdp"
            )
        if name == "colwise" and (whole := beside(hub, path, names)):
            raise ValueError(
                f"transformers' plan for {kind} shards {path}, but not {whole}, which would get gradients from only a "
                "shard of the heads; use strategy=fsdp"
            )
    for name in COUNTS:
        count = getattr(hub.config, name, None) or devices
        if count % devices:
            raise ValueError(
                f"{kind} has {name}={count}, which does not divide over a tensor-parallel group of {devices}; use "
                "another trainer.strategy.tensor_parallel_size, or strategy=fsdp"
            )


def beside(hub: nn.Module, path: str, names: dict[str, str]) -> str | None:
    """Return a parameter that is beside a layer in its module and not in the plan, or None; it would see only a shard
    of the layer's output."""
    within = path.rpartition(".")[0]
    for name, _ in hub.get_submodule(within).named_parameters():
        if not any(f"{within}.{name}".startswith(f"{known}.") for known in names):
            return f"{within}.{name}"
    return None
