"""Replicas: what DDP's options change, and what they do not."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch

from lightswitch.strategies.auto import auto
from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.plain import PlainModel
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS

TINY = (*LANGUAGE, *NO_CHECKPOINTS, "trainer.max_steps=20", "trainer.val_check_interval=20")
EACH = "trainer.log_every_n_steps=1"
SHORT = (*PLAIN, *NO_CHECKPOINTS, "strategy=ddp", "global_batch_size=24", "trainer.max_steps=3")


class WithUnused(PlainModel):
    """Holds a layer that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(3, 3)


class DropsGradients(PlainModel):
    """Leaves its last layer alone in the first steps, as DINO does."""

    def on_after_backward(self) -> None:
        if self.global_step < 2:
            for parameter in self.net[3].parameters():
                parameter.grad = None


UNUSED = (*SHORT, "model._target_=tests.engine.strategies.test_ddp.WithUnused")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*TINY, "strategy=single")


@pytest.fixture(scope="module")
def in_32_bits(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """On two devices, without a hook."""
    return runs_in(tmp_path_factory.mktemp("in_32_bits"))(*TINY, "strategy=ddp", ranks=2)


@pytest.mark.parametrize(
    "option",
    [
        "find_unused_parameters=true",
        "gradient_as_bucket_view=true",
        "static_graph=true",
        "bucket_cap_mb=0.01",
        "process_group_backend=gloo",
    ],
)
def test_an_option_keeps_the_losses(option: str, alone: Finished, train: Train) -> None:
    run = train(*TINY, "strategy=ddp", f"trainer.strategy.{option}", ranks=2)
    assert largest_difference(run, alone) <= 1e-5


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_gradients_rounded_to_16_bits_change_the_losses_a_little(hook: str, in_32_bits: Finished, train: Train) -> None:
    run = train(*TINY, "strategy=ddp", f"trainer.strategy.comm_hook={hook}", ranks=2)
    assert 0 < largest_difference(run, in_32_bits) < 1e-2  # 0: the hook was not there


def test_powersgd_starts_at_the_step_it_is_told(alone: Finished, train: Train) -> None:
    options = ("trainer.strategy.comm_hook=powersgd", "trainer.strategy.start_powerSGD_iter=10")
    run = train(*TINY, "strategy=ddp", *options, ranks=2)

    expected, found = alone.column("train/loss"), run.column("train/loss")
    differences = [abs(found[step] - expected[step]) for step in sorted(expected)]
    assert max(differences[:11]) <= 1e-5 < differences[11]  # the 11th gradient is seen in the 12th loss
    assert math.isfinite(found[19])
    assert found[19] < found[0] - 1
    assert (
        run.out.count("PowerSGD changes the gradients, and the errors it carries on are not saved in checkpoints") == 1
    )


def test_the_timeout_is_in_seconds(train: Train) -> None:
    seen = "callbacks.seen._target_=tests.engine.strategies.test_ddp.ShowTimeout"
    run = train(*SHORT, seen, "trainer.strategy.timeout_seconds=77", ranks=2)
    assert run.out.count("timeout 0:01:17") == 1


def test_unused_parameters_are_named_with_what_to_type(train: Train) -> None:
    run = train(*UNUSED, ranks=2, check=False)
    assert run.returncode == 2
    assert "Traceback" not in run.err
    assert (
        "error: spare.weight, spare.bias took no part in the loss, and ddp waits for every gradient; freeze what is "
        "not used (requires_grad=False), or type trainer.strategy.find_unused_parameters=true\n"
    ) in run.err


def test_gradients_that_the_module_drops_itself_are_no_unused_ones(train: Train) -> None:
    model = "model._target_=tests.engine.strategies.test_ddp.DropsGradients"
    alone = train(*SHORT, model, EACH, "strategy=single")
    assert largest_difference(train(*SHORT, model, EACH, "strategy=ddp", ranks=2), alone) <= 1e-5


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_are_found_where_that_is_asked_for(option: str, train: Train) -> None:
    run = train(*UNUSED, f"trainer.strategy.{option}=true", "trainer.log_every_n_steps=1", ranks=2)
    assert list(map(math.isfinite, run.column("train/loss").values())) == [True, True, True]


def test_auto_counts_devices_and_nodes() -> None:
    names = [type(auto("cpu", devices, nodes)).__name__ for devices, nodes in ((1, 1), ("auto", 1), (2, 1), (1, 2))]
    assert names == ["Single", "Single", "DDP", "DDP"]


class ShowTimeout(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        group = torch.distributed.group.WORLD
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            print("timeout", group._get_backend(trainer.strategy.root_device).options._timeout)
