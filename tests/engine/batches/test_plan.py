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


def test_a_batch_that_does_not_divide_over_the_devices_is_refused_with_its_equation() -> None:
    with pytest.raises(BatchError) as refused:
        BatchPlan.derive(100, None, 8)
    assert str(refused.value) == (
        "global_batch_size 100 does not divide over 8 devices: 100 / 8 = 12.5; use global_batch_size=96 or 104"
    )


def test_a_share_that_is_no_multiple_of_the_micro_batch_is_refused_with_its_equation() -> None:
    with pytest.raises(BatchError) as refused:
        BatchPlan.derive(64, 12, 2)
    assert str(refused.value) == (
        "global_batch_size 64 is not micro_batch_size 12 × 2 devices × a whole accumulation: "
        "64 / (12 × 2) = 2.667; use global_batch_size=48 or 72 or a micro_batch_size that divides 32"
    )


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
