"""How the GPT is cut over the devices of a tensor-parallel group (Shoeybi et al. 2019, Megatron-LM, §3)."""

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from project.models.gpt import GPT


def tensor_parallel(model: GPT, devices: int) -> dict[str, ParallelStyle]:
    """Styles by the paths of layers: whole heads and whole hidden units on each device; embeddings are not cut.

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
    plan["head"] = ColwiseParallel(output_layouts=Replicate())  # one that is tied is the embedding
    return plan
