"""Replicas: what DDP's options change, and what they do not."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightswitch.errors import Refused
from lightswitch.strategies.ddp import DDP, auto
from tests.engine.fits import LANGUAGE, PLAIN, Fit, Fits
from tests.engine.plain import NormedModel, PlainModel
from tests.night import at_night
from tests.pool import Pool, RankFailed
from tests.runs import largest_difference

SHORT = replace(PLAIN, steps=3)
UNCLIPPED = "gradient_clip_val=null"


class WithUnused(PlainModel):
    """Holds a layer that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(3, 3)


class UsesInTurns(PlainModel):
    """Calls a layer in the first micro batch of each step alone, or, with gradients that stay, in the first step."""

    def __init__(self, stays: bool) -> None:
        super().__init__()
        self.spare, self.stays = torch.nn.Linear(2, 4), stays

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_called = self.global_step == 0 if self.stays else batch_idx % 2 == 0
        return loss + self.spare(batch[0]).square().mean() if is_called else loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self.stays)


class DropsGradients(PlainModel):
    """Leaves its last layer alone in the first steps, as DINO does."""

    def on_after_backward(self) -> None:
        if self.global_step < 2:
            for parameter in self.net[3].parameters():
                parameter.grad = None


UNUSED = replace(SHORT, module=WithUnused)
OPTIONS = ("find_unused_parameters=true bucket_cap_mb=0.01", "gradient_as_bucket_view=true")


@pytest.mark.nightly
@pytest.mark.parametrize("option", [*OPTIONS, "process_group_backend=gloo"])
def test_an_option_keeps_the_losses(option: str, fits: Fits) -> None:
    (alone,), run = fits(LANGUAGE), fits(replace(LANGUAGE, strategy=f"ddp {option}"), 2)[0]
    assert largest_difference(run, alone) <= 1e-5


def test_an_evaluation_has_rank_0s_buffers_where_no_forward_pass_broadcasts_them(fits: Fits) -> None:
    normed = replace(PLAIN, module=NormedModel)
    usual, run = (fits(replace(normed, strategy=f"ddp broadcast_buffers={on}"), 2)[0] for on in ("true", "false"))
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(run, usual, metric) <= 1e-6


@pytest.mark.parametrize("hook", ["bf16", *at_night("fp16")])
def test_gradients_rounded_to_16_bits_change_the_losses_a_little(hook: str, fits: Fits) -> None:
    in_32_bits, run = (fits(replace(LANGUAGE, strategy=f"ddp{hook}"), 2)[0] for hook in ("", f" comm_hook={hook}"))
    assert 0 < largest_difference(run, in_32_bits) < 1e-2  # 0: the hook was not there


def test_unused_parameters_are_named_with_what_to_type(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(UNUSED, strategy="ddp"), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error) == (
        "spare.weight, spare.bias did not contribute to the loss, but ddp waits for every gradient; freeze "
        "unused parameters (requires_grad=False), or type trainer.strategy.find_unused_parameters=true"
    )


@pytest.mark.parametrize(("strategy", "stays"), [("ddp", False), ("ddp gradient_as_bucket_view=true", True)])
def test_so_are_those_with_a_gradient_of_before(strategy: str, stays: bool, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(SHORT, module=partial(UsesInTurns, stays), strategy=strategy), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith("spare.weight, spare.bias did not contribute to the loss, but ddp waits")


def test_gradients_that_the_module_drops_itself_are_no_unused_ones(fits: Fits) -> None:
    dropping = replace(SHORT, module=DropsGradients, micro_batch=None)
    assert largest_difference(fits(replace(dropping, strategy="ddp"), 2)[0], fits(dropping)[0]) <= 1e-5


def test_unused_parameters_are_found_where_that_is_asked_for(fits: Fits) -> None:
    run = fits(replace(UNUSED, strategy="ddp find_unused_parameters=true"), 2)[0]
    assert list(map(math.isfinite, run.column("train/loss").values())) == [True, True, True]


def test_auto_counts_devices_and_nodes() -> None:
    names = [type(auto("cpu", devices, nodes)).__name__ for devices, nodes in ((1, 1), ("auto", 1), (2, 1), (1, 2))]
    assert names == ["Single", "Single", "DDP", "DDP"]


class GoesByItsLoss(PlainModel):
    """Evaluates the loss several times a step, and goes as far as it falls."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class OverItems(GoesByItsLoss):
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Any:
        weights = batch[1].float() + 1
        losses = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum(), "items": weights.sum()}


@pytest.mark.parametrize("module", [GoesByItsLoss, OverItems])
def test_an_optimizer_that_goes_by_its_loss_has_that_of_all_samples(module: type[PlainModel], fits: Fits) -> None:
    whole = replace(PLAIN, module=module, global_batch=25, micro_batch=None, arguments="gradient_clip_val=null")
    (alone,), run = fits(whole), fits(replace(whole, strategy="ddp"), 2)[0]  # of 13 and of 12
    assert largest_difference(run, alone) <= 1e-5
    assert max(float((run.end[name] - tensor).abs().max()) for name, tensor in alone.end.items()) <= 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_refused_for_steps_of_several_micro_batches(ranks: int, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(SHORT, module=GoesByItsLoss, strategy="ddp" if ranks > 1 else "single"), ranks)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).endswith(
        "the last one's loss would be evaluated; leave micro_batch_size out, or type "
        f"global_batch_size={6 * ranks} for steps of one micro batch"
    )


def on_a_stream() -> str:
    """Wrap a module as on a GPU, where there is none: DDP says what it was given."""
    dist.init_process_group("gloo")
    strategy = DDP()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    try:
        strategy.connect(PlainModel())
        strategy.configure_ddp()
    except ValueError as error:
        return str(error)
    return ""


def test_the_model_is_wrapped_on_the_stream_of_its_steps(pool: Pool) -> None:
    """Lightning opens another, which fails where CUDA can't be opened."""
    assert "device_ids [0]" in pool(1)(on_a_stream)[0]


class ByHand(PlainModel):
    """Manual optimization by gradients of `manual_backward`, or by others, which Lightning does not see."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization, self.how = False, how

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.how == "manual":
            self.manual_backward(loss)
        elif self.how == "backward":
            loss.backward()
        else:
            parameters = [*self.parameters()]
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.2, momentum=0.9)


@pytest.mark.parametrize(("how", "strategy"), [("manual", "ddp"), ("backward", "fsdp")])
def test_an_optimizer_steps_by_gradients_of_all_samples(how: str, strategy: str, fits: Fits) -> None:
    """Of 25 samples, a rank has 13 or 12."""
    one = Fit(partial(ByHand, how), PLAIN.data, global_batch=25, micro_batch=None, arguments=UNCLIPPED)
    (alone,) = fits(one)
    for run in fits(replace(one, strategy=strategy), 2):
        assert largest_difference(run, alone) <= 1e-5
        assert max(float((run.end[name] - tensor).abs().max()) for name, tensor in alone.end.items()) <= 1e-5


@pytest.mark.parametrize("how", ["backward", "assigned"])
def test_gradients_of_the_samples_of_one_rank_are_refused(how: str, fits: Fits) -> None:
    by_hand = Fit(partial(ByHand, how), PLAIN.data, strategy="ddp", micro_batch=None, arguments=UNCLIPPED)
    with pytest.raises(RankFailed) as failed:
        fits(replace(by_hand, agrees=True), 2)
    assert isinstance(failed.value.error, Refused)
    assert "of rank 1 differs from rank 0 after step 1" in str(failed.value.error)
    assert "Call self.manual_backward(loss) in place of loss.backward()" in str(failed.value.error)


def test_zero_refuses_them_by_name(fits: Fits) -> None:
    one = Fit(partial(ByHand, "backward"), PLAIN.data, micro_batch=None, arguments=UNCLIPPED)
    with pytest.raises(RankFailed) as failed:
        fits(replace(one, strategy="deepspeed_stage_2"), 2)
    assert isinstance(failed.value.error, Refused)
    assert "DeepSpeed only reduces and steps the gradients of self.manual_backward(loss)" in str(failed.value.error)


class Reentrant(PlainModel):
    """Recomputes a block that it calls twice, by passes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        found = self.net[:2](batch[0])
        for _ in range(2):
            found = checkpoint(self.net[2], found, use_reentrant=True)
        return nn.functional.cross_entropy(self.net[3](found), batch[1])


def test_reentrant_checkpoints_are_refused_with_what_helps(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(SHORT, module=Reentrant, strategy="ddp"), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).endswith("with use_reentrant=False")
