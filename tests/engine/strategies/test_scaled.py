"""precision=16-mixed under fsdp: one scale of the loss, and the same steps skipped on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import isfinite

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightswitch.hooked_strategy import with_mixin
from lightswitch.strategies.sharded import UnscalesOverMeshes
from tests.engine.conftest import Train
from tests.engine.fits import ADAMW, LANGUAGE, TENSOR_PARALLEL, Fit, Fits, of_conf
from tests.engine.models.language import LanguageModel
from tests.engine.tiny import LANGUAGE as TYPED
from tests.night import at_night
from tests.pool import Pool
from tests.runs import largest_difference

STEPS = 9
SCALE = 2.0**22  # at which this model's gradients leave the range of 16 bits


class Tempered(LanguageModel):
    """With a number as a parameter, which each device keeps whole beside shards."""

    def configure_model(self) -> None:
        if self.transformer is None:
            super().configure_model()
            self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.temperature


class Scale(pl.Callback):
    """Logs the scale after each batch, which falls with each step that is skipped."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        scale = trainer.precision_plugin.scaler.get_scale()
        trainer.logger.log_metrics({"scale": scale}, step=trainer.global_step)


def scaled(strategy: str) -> Strategy:
    """On the CPU, where Lightning makes bf16-mixed of the precision's name."""
    made = of_conf(strategy)()
    made.precision_plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=SCALE, growth_interval=2))
    return made


def fit(strategy: str, module: Callable[[], pl.LightningModule]) -> Fit:
    return replace(LANGUAGE, strategy=partial(scaled, strategy), module=module, steps=STEPS, callbacks=(Scale,))


TEMPERED, PLAIN = partial(Tempered, ADAMW), partial(LanguageModel, ADAMW)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "ranks", "module", "most"),
    [
        *(("fsdp", 2, TEMPERED, 1e-4), (TENSOR_PARALLEL, 4, PLAIN, 2e-3)),
        *at_night(("fsdp_hybrid shard_size=2", 4, TEMPERED, 1e-4)),
    ],
)
def test_it_scales_skips_and_steps_as_replicas_do(
    strategy: str, ranks: int, module: Callable[[], pl.LightningModule], most: float, fits: Fits
) -> None:
    """As many of them: the gradient that a device computes in 16 bits is larger the fewer micro batches a step has."""
    replicas = fits(fit("ddp", module), 2 if strategy == TENSOR_PARALLEL else ranks)[0]
    sharded = fits(fit(strategy, module), ranks)
    scales = list(replicas.column("scale").values())
    assert min(scales) < SCALE, "no step was skipped"
    assert any(later > earlier for earlier, later in pairwise(scales)), "the scale never grew"
    for rank in sharded:
        assert rank.column("scale") == replicas.column("scale")
    for metric in ("train/loss", "val/loss"):
        assert largest_difference(sharded[0], replicas, metric) <= most, metric
    norms = {step: norm for step, norm in replicas.column("grad_norm").items() if isfinite(norm)}
    assert norms == pytest.approx({step: sharded[0].column("grad_norm")[step] for step in norms}, rel=10 * most)


def unscaled(infinite_on: int | None) -> tuple[float, list[float]]:
    """Return what a rank of four finds, and the largest of its gradients: over two meshes, and over none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    over = ((mesh["data"], [Shard(0)]), (mesh, [Shard(0), Shard(1)]))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 4), *of)) for of in over] + [nn.Parameter(torch.ones(3))]
    for parameter in parameters:
        parameter.grad = parameter.detach() * SCALE
    if dist.get_rank() == infinite_on:
        parameters[0].grad.to_local().fill_(torch.inf)  # of which half of the ranks have no part
    scaler = with_mixin(UnscalesOverMeshes, GradScaler("cpu", init_scale=SCALE))
    scaler.scale(torch.ones(()))  # makes it
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler.unscale_(optimizer)
    (found,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    return found.item(), [float(getattr(p.grad, "_local_tensor", p.grad).max()) for p in parameters]


@pytest.mark.parametrize("infinite_on", [None, 1, 2])
def test_all_ranks_find_what_is_infinite_in_a_shard_of_one(infinite_on: int | None, pool: Pool) -> None:
    for rank, (found, largest) in enumerate(pool(4)(unscaled, infinite_on)):
        assert found == (infinite_on is not None)
        assert largest == [torch.inf if rank == infinite_on else 1, 1, 1]


@pytest.mark.gpu(2)
def test_a_run_on_gpus_keeps_the_curve(train: Train) -> None:
    run = (*TYPED, "trainer.accelerator=gpu", "precision=16-mixed", "trainer.max_steps=20")
    alone, sharded = train(*run, "strategy=single"), train(*run, "strategy=fsdp", ranks=2)
    for step, loss in alone.column("train/loss").items():
        assert sharded.column("train/loss")[step] == pytest.approx(loss, rel=1e-2)
