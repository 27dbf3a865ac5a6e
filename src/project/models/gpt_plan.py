"""Tensor-parallel plan of the GPT (Shoeybi et al. 2019, Megatron-LM, §3)."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from project.models.cross_entropy import LinearCrossEntropy
from project.models.gpt import GPT


class VocabularyParallel(ParallelStyle):
    """Style of a loss whose head is sharded by token ids: each device computes the logits of its ids, without a
    gather."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LinearCrossEntropy)
        module.group = device_mesh.get_group()
        module.register_forward_pre_hook(local_weight)
        return module


def local_weight(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, weight, targets = inputs
    return x, weight.to_local() if isinstance(weight, DTensor) else weight, targets


def tensor_parallel(model: GPT, devices: int) -> dict[str, ParallelStyle]:
    """Return styles by the paths of layers: each device has whole heads and hidden units; embeddings are not sharded.

    Raises:
        ValueError: heads or hidden units do not divide over the devices.
    """
    shape = model.shape
    for name, count in (("heads", shape.heads), ("mlp_width", shape.hidden_width)):
        if count % devices:
            raise ValueError(
                f"the GPT's {name} {count} does not divide over a tensor-parallel group of {devices}; "
                f"use model.{name}={count // devices * devices + devices}, or another tensor_parallel_size"
            )
    plan: dict[str, ParallelStyle] = {}
    for layer, style in (
        ("attention.queries", ColwiseParallel()),
        ("attention.keys", ColwiseParallel()),
        ("attention.values", ColwiseParallel()),
        ("attention.output", RowwiseParallel()),
        ("mlp.gate", ColwiseParallel()),
        ("mlp.input", ColwiseParallel()),
        ("mlp.output", RowwiseParallel()),
    ):
        plan[f"transformer.blocks.*.{layer}"] = style
    if not model.tied and model.vocab_size % devices == 0:  # a tied head is the embedding
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
        plan["cross_entropy"] = VocabularyParallel()
    return plan
