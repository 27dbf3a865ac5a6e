"""What hooks, steps and optimizers read of sharded weights is what one process reads."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightswitch.errors import Refused
from lightswitch.strategies.weights import ShardsInHook, let_shards_be_used
from tests.engine.fits import PLAIN, Fit, Fits
from tests.engine.plain import PlainModel
from tests.engine.strategies.writing import Batch
from tests.pool import Pool, RankFailed
from tests.runs import largest_difference

NUMBERS: dict[str, Callable[[Tensor], Any]] = {  # of which torch would read the rank's part
    "norm": lambda w: w.norm().item(),
    "norm 1": lambda w: torch.norm(w, 1).item(),
    "vector_norm": lambda w: float(torch.linalg.vector_norm(w)),
    "norm squared": lambda w: float(w.norm() ** 2),
    "sum": lambda w: w.sum().item(),
    "mean": lambda w: float(w.mean()),
    "minus the mean": lambda w: float(-w.mean() * 2 + 1),
    "prod": lambda w: w.prod().item(),
    "std": lambda w: float(w.std()),
    "at least": lambda w: float(max(w.std(), 1e-3)),
    "var_mean": lambda w: float(torch.var_mean(w)[1]),
    "count_nonzero": lambda w: int(w.count_nonzero()),
    "any": lambda w: (w > 0.9).any().item(),
    "all": lambda w: bool((w < 0.9).all()),
    "condition": lambda w: 2.0 if w.norm() > 2 else 1.0,
    "share": lambda w: (w > 0).float().mean().item(),
    "index": lambda w: [*range(99)][int((w > 0).sum())],
}
OF_HOOKS: dict[str, Callable[[Tensor], Any]] = {  # which torch computes on shards, and a hook reads as one tensor
    "max": lambda w: w.abs().max().item(),
    "norm inf": lambda w: float(w.norm(float("inf"))),
    "minus the max": lambda w: float(-w.max()),
    "argmax": lambda w: w.argmax().item(),
    "median": lambda w: float(w.median()),
    "mse": lambda w: float(nn.functional.mse_loss(w, 2 * w)),
    "normalize": lambda w: float(nn.functional.normalize(w, float("inf"), dim=0).sum()),
    "histc": lambda w: w.histc(5, -2, 2).max().item(),
    "number in numpy": lambda w: float(w.norm().detach().numpy()),
    "stack": lambda w: float(torch.norm(torch.stack([w.norm(), 2 * w.norm()]))),
    "tensor": lambda w: float(torch.tensor([w.norm(), w.std(correction=0)]).sum()),
    "format": lambda w: float(f"{w.norm():.5f} {w.median():.5f}".split()[1]),
    "an average in a buffer": lambda w: float(torch.zeros(w.shape).sub_(0.3 * w).norm()),
    "clipped": lambda w: float(_clipped(nn.Parameter(w.detach()))),
}
SHAPES = [(5, 3), (4, 2), (3,), (1,), (1, 3), (2, 1)]  # over two ranks: unequal and equal shards, and an empty one


def _clipped(weight: nn.Parameter) -> Tensor:
    weight.grad = weight.detach() * 2
    return nn.utils.clip_grad_norm_([weight], 0.1) + weight.grad.norm()


def differing(of_hooks: bool) -> list[str]:
    """Return the reads that are not those of one process."""
    let_shards_be_used()
    dist.init_process_group("gloo")
    mesh, found = init_device_mesh("cpu", (2,)), []
    for shape in SHAPES:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.1
        # the rank with an empty shard would fail, as an empty tensor has no maximum
        for name, read in (NUMBERS | OF_HOOKS if of_hooks and len(whole) > 2 else NUMBERS).items():
            shards = distribute_tensor(whole, mesh, [Shard(0)])
            with ShardsInHook("a hook", []) if of_hooks else torch.no_grad():
                value = read(shards)
            if value != pytest.approx(read(whole), rel=1e-5, abs=1e-6, nan_ok=True):
                found.append(f"{name} of {shape}: {value}, not {read(whole)}")
    return found


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0", "ignore:Found a non-scalar tensor with numel=1")
@pytest.mark.parametrize("of_hooks", [True, False], ids=["in a hook", "elsewhere"])
def test_reads_are_those_of_one_process(of_hooks: bool, pool: Pool) -> None:
    assert pool(2)(differing, of_hooks) == [[], []]


class Clipping(torch.optim.SGD):
    """Clips each gradient by the norm of its weight, as optimizers with adaptive clipping do: with Python numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure and torch.enable_grad()(closure)()
        for one in (one for group in self.param_groups for one in group["params"]):
            if (norm := one.grad.norm().item()) > (most := max(one.norm().item(), 1e-3) * 0.05):
                one.grad.mul_(most / norm)
        super().step()
        return loss


class Reading(PlainModel):
    """Reads norms as Python numbers, and trains by them, wherever its code may."""

    def __init__(self) -> None:
        super().__init__(width=5)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.log("norm", float(self.net[3].weight.detach().norm()))
        return (1 + self.net[0].weight.norm().item()) * super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        total = math.sqrt(sum(one.grad.norm(2).item() ** 2 for one in self.parameters()))
        assert total == pytest.approx(float(norms["grad_2.0_norm_total"]), rel=1e-5)
        for one in self.parameters():
            one.grad = one.grad.clone() * min(1, 0.5 / total)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        largest = max(one.grad.abs().max().item() for one in self.parameters())
        self.clip_gradients(optimizer, gradient_clip_val=largest / 2, gradient_clip_algorithm="value")

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for one in self.net.parameters():
            if (norm := one.norm().item()) > 1:
                one.mul_(1 / norm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Clipping(self.parameters(), lr=0.5, momentum=0.9)


def fit(module: Callable[[], pl.LightningModule], strategy: str = "single") -> Fit:
    arguments = "gradient_clip_val=null"
    return replace(PLAIN, module=module, strategy=strategy, micro_batch=None, steps=6, arguments=arguments)


def test_a_module_that_trains_by_what_it_reads_trains_as_in_one_process(fits: Fits) -> None:
    (alone,), sharded = fits(fit(Reading)), fits(fit(Reading, "fsdp units=[Linear]"), 2)[0]
    assert {"grad_2.0_norm_total", "norm"} <= alone.columns.keys()
    for name in alone.columns:
        assert largest_difference(sharded, alone, name) <= 1e-5, name


PART = "on_train_batch_end of Touches takes a part of net.0.weight, of which each rank holds a shard"
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rows": (lambda w: w[1:3].mul_(0.9), PART),
    "diagonal": (lambda w: w.diagonal().mul_(0.9), PART),
    "file": (
        lambda w: torch.save(w, io.BytesIO()),
        "a weight of shape (5, 2), of which each rank holds a shard, is pick",
    ),
    "array": (
        lambda w: w.cpu().numpy(),
        "Touches fails in its first steps under FSDP, which shards parameters over devic",
    ),
}


class Touches(PlainModel):
    def __init__(self, way: str) -> None:
        super().__init__(width=5)
        self.way = way

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        REFUSED[self.way][0](self.net[0].weight)


@pytest.mark.parametrize("way", REFUSED)
def test_what_a_hook_can_not_do_to_shards_is_refused(way: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(fit(partial(Touches, way), "fsdp"), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(REFUSED[way][1])
