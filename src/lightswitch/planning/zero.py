"""The kinds of the tensors that DeepSpeed's optimizers hold, on whichever device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightswitch.planning.timeline import Kind

# Attributes of DeepSpeedZeroOptimizer (stages 1 and 2) and DeepSpeedZeroOptimizer_Stage3, in DeepSpeed 0.19
_COPIES = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # which the optimizer steps
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")
_ON_HOST = (
    *("accumulated_grads_in_cpu", "offload_gradient_dict", "param_buffer_of_bit16_for_cpu_offload_groups"),
    "temp_grad_buffer_for_cpu_offload",
)
_ON_DEVICE = ("temp_grad_buffer_for_gpu_offload",)


def kinds(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[Kind, Tensor]]:
    """Yield the tensors that a ZeRO optimizer holds now, with their kinds; where some share memory, the last kind
    counts.

    Where the optimizer is offloaded, its part of the gradients is in the host's memory beside its state, and is told
    with that.

    Args:
        parameters: of the model; at stage 3, a rank keeps a part of each, and now and then has the whole.
    """
    offloads = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    gradients: Kind = "optimizer" if offloads else "gradients"
    copies = _tensors(optimizer, _COPIES)
    yield from (("communication", tensor) for tensor in _buffers(optimizer))
    yield from (("optimizer", tensor) for tensor in (*_tensors(optimizer, _ON_HOST), *copies))
    yield from ((gradients, tensor) for tensor in _tensors(optimizer, _GRADIENTS))
    yield from ((gradients, copy.grad) for copy in copies if copy.grad is not None)
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            yield "gathered", parameter.data
            yield "parameters", parameter.ds_tensor


def _buffers(optimizer: Any) -> Iterator[Tensor]:
    yield from _tensors(optimizer, _ON_DEVICE)
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from (leaf for leaf in tree_leaves(bucket.buffer) if isinstance(leaf, Tensor))


def _tensors(optimizer: Any, names: Iterable[str]) -> list[Tensor]:
    leaves = tree_leaves([getattr(optimizer, name, None) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
