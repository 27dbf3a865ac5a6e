"""An optimizer that goes by rows, norms or products trains as in one process, or is refused in a line."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import optim

from lightswitch.errors import Refused
from lightswitch.strategies.elementwise import refuse_in_pieces
from tests.engine.fits import PLAIN, Fit, Fits
from tests.engine.plain import PlainModel
from tests.night import at_night
from tests.pool import RankFailed
from tests.runs import largest_difference

BY_ELEMENT = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
OTHERS = ("Adafactor", "LBFGS", *(["Muon"] if hasattr(optim, "Muon") else []))


class Lars(optim.Optimizer):
    """As timm's: scales an update by the parameter's norm where its group has weight decay."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.norm() / parameter.grad.norm() if group["weight_decay"] else 1.0
                parameter.sub_(parameter.grad * (group["lr"] * scale))
        return loss


class Estimating(optim.Optimizer):
    """Estimates a rate over all parameters, which acts from the third step on, as Prodigy's does."""

    def __init__(self, params: Any, lr: float = 0.05, d: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": d, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["steps"] += 1
            gradients = [parameter.grad.flatten() for parameter in group["params"]]
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] * group["d"]))
            if group["steps"] > 1:
                group["d"] = 1 / (1 + sum(float(gradient.dot(gradient)) for gradient in gradients))
        return loss


class EstimatingModel(PlainModel):
    def __init__(self) -> None:
        super().__init__(width=15)  # rows that two devices have different counts of

    def configure_optimizers(self) -> optim.Optimizer:
        return Estimating(self.parameters())


class LarsModel(PlainModel):
    def configure_optimizers(self) -> optim.Optimizer:
        return Lars(self.parameters(), weight_decay=0.1)


class AdafactorModel(PlainModel):
    def configure_optimizers(self) -> optim.Optimizer:
        return optim.Adafactor(self.parameters(), lr=0.05)


def made(name: str, **arguments: Any) -> optim.Optimizer:
    return getattr(optim, name)([torch.nn.Parameter(torch.zeros(4, 6))], lr=0.01, **arguments)


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_torchs_optimizers_by_element_are_taken(name: str) -> None:
    refuse_in_pieces(made(name, foreach=True))


def test_so_are_those_with_options_that_ask_for_a_device() -> None:
    refuse_in_pieces(made("AdamW", amsgrad=True, capturable=True))
    refuse_in_pieces(made("SGD", momentum=0.9, nesterov=True, weight_decay=0.1))


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused_in_pieces(name: str) -> None:
    with pytest.raises(Refused, match=f"{name} does not update each element independently"):
        refuse_in_pieces(made(name))


@pytest.mark.parametrize("lr", [1.0, *at_night(0.1, 0.001)])
@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe"}, {"max_iter": 4}], ids=str)
def test_no_problem_is_solved_by_lbfgs_and_taken_for_elementwise(lr: float, options: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="LBFGS does not update each element independently"):
        refuse_in_pieces(optim.LBFGS([torch.nn.Parameter(torch.zeros(4, 6))], lr=lr, **options))


def test_what_a_group_alone_asks_for_is_refused_in_pieces() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, 6)) for _ in range(2)]
    refuse_in_pieces(Lars(parameters))
    with pytest.raises(Refused, match="Lars does not update each element independently"):
        refuse_in_pieces(Lars([{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.1}]))


def test_groups_are_tried_at_the_rate_before_a_schedule_begins_at_0() -> None:
    optimizer = Lars([torch.nn.Parameter(torch.zeros(4, 6))], weight_decay=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(Refused, match="Lars does not update each element independently"):
        refuse_in_pieces(optimizer)


def test_groups_that_differ_by_element_are_taken_and_stay_as_they_were() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, 6)) for _ in range(2)]
    optimizer = optim.AdamW(
        [{"params": parameters[:1], "lr": torch.tensor(0.1), "name": "head"}, {"params": parameters[1:]}]
    )
    refuse_in_pieces(optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert not optimizer.state
    assert not any(map(torch.count_nonzero, parameters))


def test_an_estimate_that_acts_from_the_third_step_on_is_refused_in_pieces() -> None:
    with pytest.raises(Refused, match="Estimating does not update each element independently"):
        refuse_in_pieces(Estimating([torch.nn.Parameter(torch.zeros(4, 6))]))


def test_what_can_not_be_tried_is_taken() -> None:
    refuse_in_pieces(made("SparseAdam"))


def test_the_random_state_stays_as_it_was() -> None:
    before = torch.random.get_rng_state()
    refuse_in_pieces(made("Adam"))
    assert torch.equal(torch.random.get_rng_state(), before)


LARS, ADAFACTOR, ESTIMATING = (replace(PLAIN, module=module) for module in (LarsModel, AdafactorModel, EstimatingModel))


def _refusal(fit: Fit, strategy: str, fits: Fits) -> str:
    with pytest.raises(RankFailed) as failed:
        fits(replace(fit, strategy=strategy), 2)
    assert isinstance(failed.value.error, Refused)
    return str(failed.value.error)


@pytest.mark.parametrize("strategy", ["deepspeed_stage_1", *at_night("deepspeed_stage_3")])
def test_a_run_that_would_train_otherwise_is_refused(strategy: str, fits: Fits) -> None:
    pytest.importorskip("deepspeed")
    assert _refusal(LARS, strategy, fits) == (
        "Lars does not update each element independently, so it would train differently with the flat shards of "
        "DeepSpeed; use strategy=ddp or fsdp"
    )


@pytest.mark.nightly
def test_shards_that_keep_their_shapes_are_stepped_as_the_whole(fits: Fits) -> None:
    (alone,), run = fits(LARS), fits(replace(LARS, strategy="fsdp"), 2)[0]
    assert largest_difference(run, alone) <= 1e-5


@pytest.mark.parametrize(("fit", "name"), [(ESTIMATING, "Estimating"), *at_night((ADAFACTOR, "Adafactor"))])
def test_an_optimizer_that_fails_for_shards_is_refused_in_a_line(fit: Fit, name: str, fits: Fits) -> None:
    told = _refusal(fit, "fsdp", fits)
    assert told.startswith(f"{name} ")
    assert told.endswith("; use strategy=ddp")


class QuasiNewtonModel(PlainModel):
    def configure_optimizers(self) -> optim.Optimizer:
        return optim.LBFGS(self.parameters(), max_iter=2, line_search_fn="strong_wolfe")


def test_an_optimizer_whose_state_no_resume_could_lay_out_again_is_refused(fits: Fits) -> None:
    told = _refusal(replace(PLAIN, module=QuasiNewtonModel, arguments="gradient_clip_val=null"), "fsdp", fits)
    assert re.fullmatch(
        r"LBFGS keeps shards of another shape than its parameters' \(H_diag, .*\), from which a sharded run "
        r"can't be resumed; use strategy=ddp",
        told,
    )
