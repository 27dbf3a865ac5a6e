from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightswitch.batches.loaders import Combined
from lightswitch.batches.order import EvaluationBatches, Permutation, TrainingSlices, epoch_order
from lightswitch.batches.plan import BatchPlan, RankShare, scaled_learning_rate
from lightswitch.errors import BatchError, Refused


def slices(plan: BatchPlan, samples: int, rank: int, drop_last: bool = False, epoch: int = 0, step: int = 0):
    found = TrainingSlices(RankShare(plan, rank, seed=1), RandomSampler(range(samples)), samples, drop_last)
    found.start_at(epoch, step)
    return found


@settings(max_examples=60)
@given(
    samples=st.integers(1, 90),
    global_batch=st.integers(1, 40),
    replicas=st.integers(1, 5),
    micro=st.none() | st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_every_cut_of_an_epoch_reads_the_same_samples_a_step(
    samples: int, global_batch: int, replicas: int, micro: int | None, drop_last: bool
) -> None:
    plan = BatchPlan.derive(global_batch, micro, replicas)
    accumulation = plan.accumulation
    whole = BatchPlan(plan.global_batch, plan.global_batch, 1, 1)
    steps = [batch for *_, batch in slices(whole, samples, 0, drop_last)]
    ranks = [slices(plan, samples, rank, drop_last) for rank in range(replicas)]
    batches = [[batch for *_, batch in rank] for rank in ranks]
    assert {len(rank) for rank in batches} == {len(steps) * accumulation}
    for step, expected in enumerate(steps):
        read: Counter[int] = Counter()
        weights = 0.0
        for micro_index in range(accumulation):
            assert all(len(rank[step * accumulation + micro_index]) <= plan.micro_batch for rank in batches)
            for rank, sampler in zip(batches, ranks, strict=True):
                weight = sampler.weight_and_samples(step, micro_index)[0]
                weights += weight
                if weight:  # an empty slice reads one sample, at weight 0
                    read.update(rank[step * accumulation + micro_index])
        assert read == Counter(expected)
        assert weights == pytest.approx(replicas * accumulation)


def test_a_resumed_epoch_yields_the_rest_and_the_next_one_all() -> None:
    plan = BatchPlan(10, 5, 1, 2)
    whole = [batch for *_, batch in slices(plan, 47, 0)]
    resumed = slices(plan, 47, 0, step=3)
    assert [batch for *_, batch in resumed] == whole[6:]
    assert len(resumed) == len(whole) == 10
    resumed.set_epoch(1)
    assert len([*resumed]) == 10


def test_position_is_read_at_the_first_batch_not_when_the_iterator_is_made() -> None:
    sampler = slices(BatchPlan(10, 10, 1, 1), 50, 0)
    early = iter(sampler)
    sampler.set_epoch(4)
    assert next(early)[0] == 4


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(30)),
        RandomSampler(range(30), replacement=True, num_samples=30),
        RandomSampler(range(30), generator=torch.Generator()),
        WeightedRandomSampler([1.0] * 15 + [9.0] * 15, num_samples=30),
        SubsetRandomSampler(range(30)),
        DistributedSampler(range(30), num_replicas=2, rank=1),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_random_order_is_a_function_of_its_seed_alone(sampler: object) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = list(epoch_order(sampler, 30, seed=1, epoch=2))
    assert torch.equal(torch.get_rng_state(), state)
    random.seed(9), np.random.seed(9), torch.rand(5)
    assert list(epoch_order(sampler, 30, seed=1, epoch=2)) == first
    assert list(epoch_order(sampler, 30, seed=2, epoch=2)) != first
    assert len(first) == 30


@pytest.mark.parametrize("drawn", [10, 30, 70])
def test_a_random_sampler_draws_its_number_from_the_whole_set(drawn: int) -> None:
    order = list(epoch_order(RandomSampler(range(30), num_samples=drawn), drawn, seed=1, epoch=2))
    assert len(order) == drawn
    assert len(set(order)) == min(drawn, 30)
    assert max(order) < 30
    assert set(order) != set(range(10))


def test_the_samples_of_passes_beside_a_longer_loader_are_counted() -> None:
    combined, plan = Combined(), BatchPlan(12, 12, 1, 1)
    TrainingSlices(RankShare(plan, 0, 1), RandomSampler(range(24)), 24, False, combined)
    combined.others.append(range(20))  # a loader of 20 batches that runs unchanged
    assert combined.longest.samples_before(20, 0) == 240


def test_a_loader_that_does_not_shuffle_keeps_its_order() -> None:
    assert list(epoch_order(SequentialSampler(range(7)), 7, seed=1, epoch=2)) == list(range(7))
    plain = DistributedSampler(range(7), num_replicas=2, rank=1, shuffle=False)
    assert list(epoch_order(plain, 7, seed=1, epoch=2)) == list(range(7))


@given(samples=st.integers(1, 60), replicas=st.integers(1, 5), batch=st.integers(1, 9))
def test_evaluation_reads_each_sample_once_in_equally_many_batches_a_rank(
    samples: int, replicas: int, batch: int
) -> None:
    loader, plan = DataLoader(range(samples), batch), BatchPlan(90, 90, replicas, 1)
    if samples < replicas:
        with pytest.raises(Refused, match=f"{samples} samples of a set, which {replicas} devices can't share"):
            EvaluationBatches(loader, RankShare(plan, 0, seed=1))
        return
    slices = [EvaluationBatches(loader, RankShare(plan, rank, seed=1)) for rank in range(replicas)]
    ranks = [list(one) for one in slices]
    assert len({len(batches) for batches in ranks}) == 1
    assert [index for rank in ranks for part in rank for index in part] == list(range(samples))
    assert all(part for rank in ranks for part in rank)
    if replicas == 1:
        assert max(map(len, ranks[0])) <= batch


# The sizes of batches


@given(micro=st.integers(1, 64), replicas=st.integers(1, 64), accumulation=st.integers(1, 16))
def test_a_batch_that_divides_is_cut_into_what_it_is_made_of(micro: int, replicas: int, accumulation: int) -> None:
    plan = BatchPlan.derive(micro * replicas * accumulation, micro, replicas)
    assert (plan.micro_batch, plan.replicas, plan.accumulation) == (micro, replicas, accumulation)


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


def test_the_order_of_a_large_set_is_a_permutation_that_takes_no_memory() -> None:
    for samples in (1, 2, 5, 16, 17, 4097):
        assert sorted(Permutation(samples, seed=7)[:].tolist()) == list(range(samples))
    huge, other = (epoch_order(RandomSampler(range(10**9)), 10**9, seed, epoch=0) for seed in (1, 2))
    assert isinstance(huge, Permutation)
    assert (len(huge), huge[7]) == (10**9, huge[5:10][2])
    assert list(huge[:64]) != list(other[:64])
    assert 0.45e9 < np.mean(huge[:4096]) < 0.55e9
