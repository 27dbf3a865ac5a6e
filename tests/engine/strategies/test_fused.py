"""Adam and AdamW step by torch's fused kernel wherever it takes their parameters, whatever made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightswitch.checkpoints import optimizers
from lightswitch.strategies.callbacks import fuse
from tests.engine.fits import LANGUAGE, TENSOR_PARALLEL, Fits
from tests.engine.models.language import LanguageModel
from tests.night import at_night


class Steps(pl.Callback):
    """Logs by which kernel each group steps; DeepSpeed's optimizer has another within."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
        trainer.logger.log_metrics({f"fused_{n}": group["fused"] for n, group in enumerate(optimizer.param_groups)})


SHORT = replace(LANGUAGE, steps=1, callbacks=(Steps,))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "ranks", "fused"),
    [
        *(("single", 1, (True, True)), ("fsdp", 2, (True, True)), ("deepspeed_stage_1", 2, (True, True))),
        *at_night(("deepspeed_stage_3", 2, (True, True))),
        (TENSOR_PARALLEL, 4, (None, True)),  # the matrices, some of which are cut twice; norms
    ],
)
def test_a_run_steps_by_the_fused_kernel(
    strategy: str, ranks: int, fused: tuple[bool | None, bool], fits: Fits
) -> None:
    for rank in fits(replace(SHORT, strategy=strategy), ranks):
        assert (rank.columns["fused_0"][0], rank.columns["fused_1"][0]) == fused


def test_gradients_are_clipped_beside_a_fused_optimizer_in_bfloat16(fits: Fits) -> None:
    fused = partial(LanguageModel, partial(AdamW, lr=0.01, fused=True))
    fits(replace(LANGUAGE, module=fused, steps=1, arguments="precision=bf16-mixed"))


# Which groups


def _fused(parameter: torch.Tensor, make: Callable[..., Optimizer] = AdamW, **arguments: object) -> object:
    optimizer = make([nn.Parameter(parameter)], lr=0.1, **arguments)
    fuse(optimizer)
    return optimizer.param_groups[0].get("fused")


def test_it_is_for_real_dense_parameters_of_optimizers_that_ask_for_nothing_else() -> None:
    ones = torch.ones(4, 3)
    assert _fused(ones) is True
    assert _fused(ones, Adam) is True
    assert _fused(ones, fused=False) is False
    assert _fused(ones, foreach=True) is None
    assert _fused(ones, differentiable=True) is None
    assert _fused(ones, torch.optim.SGD) is None  # it also takes sparse gradients, and the kernel does not
    assert _fused(ones.cfloat()) is None
    assert _fused(torch.ones(4, 8)[:, :3]) is None  # whose neighbours in memory the kernel would change


def test_a_checkpoint_does_not_say_how_the_run_that_reads_it_steps() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=0.1, fused=False)
    group = {**optimizer.param_groups[0], "params": ["weight"]}
    state = {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    optimizers.load(optimizer, [group], state, {"param_groups": [{**group, "lr": 0.2, "fused": True}]})
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["fused"]) == (0.2, False)


@pytest.mark.gpu
def test_the_count_of_steps_is_read_to_where_the_kernel_wants_it(tmp_path: Path) -> None:
    saved = AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    saved.param_groups[0]["params"][0].grad = torch.ones(2)
    saved.step()
    on_gpu = AdamW([nn.Parameter(torch.ones(2, device="cuda"))], lr=0.1)
    fuse(on_gpu)
    group = {**on_gpu.param_groups[0], "params": ["weight"]}
    state = {"weight": dict(saved.state[saved.param_groups[0]["params"][0]])}
    optimizers.load(on_gpu, [group], state, {"param_groups": [{**saved.param_groups[0], "params": ["weight"]}]})
    parameter = on_gpu.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter)
    on_gpu.step()
    assert on_gpu.state[parameter]["step"].device.type == "cuda"
    assert on_gpu.state[parameter]["step"].item() == 2
