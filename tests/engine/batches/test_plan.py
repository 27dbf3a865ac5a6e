from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightswitch.batches.plan import BatchPlan, scaled_learning_rate
from lightswitch.errors import BatchError


@given(micro=st.integers(1, 64), replicas=st.integers(1, 64), accumulation=st.integers(1, 16))
def test_a_batch_that_divides_is_cut_into_what_it_is_made_of(micro: int, replicas: int, accumulation: int) -> None:
    plan = BatchPlan.derive(micro * replicas * accumulation, micro, replicas)
    assert (plan.micro_batch, plan.replicas, plan.accumulation) == (micro, replicas, accumulation)


def test_without_a_micro_batch_a_device_takes_its_whole_share() -> None:
    assert BatchPlan.derive(96, None, 8) == BatchPlan(global_batch=96, micro_batch=12, replicas=8, accumulation=1)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ((512, None, 24), "512 samples a step = 21 or 22 × 24 devices × accumulation 1, 3 % idle"),
        ((64, 12, 2), "64 samples a step = 10 or 11 × 2 devices × accumulation 3, 3 % idle"),
        ((16, None, 24), "16 samples a step = 0 or 1 × 24 devices × accumulation 1, 33 % idle"),
        ((10000, None, 3), "10000 samples a step = 3333 or 3334 × 3 devices × accumulation 1, 1 % idle"),
    ],
)
def test_a_batch_that_does_not_divide_is_cut_as_evenly_as_it_can_be(
    batch: tuple[int, int | None, int], told: str
) -> None:
    assert str(BatchPlan.derive(*batch)) == told


@pytest.mark.parametrize(("batch", "micro"), [(0, None), (-4, None), (8, 0)])
def test_batches_count_at_least_one_sample(batch: int, micro: int | None) -> None:
    with pytest.raises(BatchError, match="at least 1"):
        BatchPlan.derive(batch, micro, 1)


def test_trainer_arguments_that_count_steps_become_micro_batches() -> None:
    trainer = {"limit_train_batches": 10, "val_check_interval": 0.5, "overfit_batches": 1, "fast_dev_run": True}
    counted = {"limit_train_batches": 30, "overfit_batches": 3, "fast_dev_run": 3}
    assert BatchPlan.derive(12, 4, 1).trainer_arguments(trainer) == counted


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rates_follow_the_global_batch(rule: str, expected: float) -> None:
    assert scaled_learning_rate(0.1, rule, global_batch=256, reference_batch=64) == pytest.approx(expected)


def test_an_unknown_scaling_rule_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'lineer'; use one of: none, linear, sqrt"):
        scaled_learning_rate(0.1, "lineer", 64, 64)
