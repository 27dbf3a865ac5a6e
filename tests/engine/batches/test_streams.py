"""A stream is one that all ranks share: the same global batches at any cut, each sample once, and on from any step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.loaders import evaluation_loader, training_loader
from lightswitch.batches.plan import BatchPlan, Position, RankShare
from lightswitch.errors import Refused
from lightswitch.planning.simulation import first_samples
from tests.engine.batches.streams import SizedStream, StatefulStream, Stream, StreamData, WorkerSplit
from tests.engine.batches.test_randomness import Masking
from tests.engine.fits import local_trainer
from tests.engine.plain import PlainModel
from tests.night import at_night

ALONE = Position()


class Unseeded(Stream):
    """Shuffles by a generator of its own, as webdataset does unless it is told otherwise."""

    def __iter__(self) -> Iterator[Any]:
        samples = [*super().__iter__()]
        random.Random().shuffle(samples)
        return iter(samples)


def _training(stream: Any, plan: BatchPlan, rank: int = 0, at: Position = ALONE, **arguments: Any) -> DataLoader:
    made = training_loader(DataLoader(stream, 3, **arguments), RankShare(plan, rank, 1))
    made.sampler.start_at(at.epoch, at.step)
    return made


def _ids(loader: Any, count: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader, count)]


@pytest.mark.parametrize("workers", [0, *at_night(2)])
def test_a_generator_of_a_collate_function_follows_the_position(workers: int) -> None:
    plan, stream = BatchPlan(8, 8, 1, 1), Stream(range(61))
    whole, rest = (
        _ids(_training(stream, plan, at=Position(step=step), collate_fn=Masking(), num_workers=workers))
        for step in (0, 3)
    )
    assert rest == whole[3:]
    assert len({draw for _, draw in whole}) == 8


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 90),
    replicas=st.integers(1, 5),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    buffer=st.sampled_from((0, 7)),
    drop_last=st.booleans(),
)
def test_every_cut_of_a_stream_reads_the_same_samples_a_step(
    samples: int, replicas: int, micro: int, accumulation: int, buffer: int, drop_last: bool
) -> None:
    plan = BatchPlan(micro * replicas * accumulation, micro, replicas, accumulation)
    whole = BatchPlan(plan.global_batch, plan.global_batch, 1, 1)
    stream = Stream(range(samples), buffer)
    if drop_last and samples < plan.global_batch:
        return
    steps = _ids(_training(stream, whole, drop_last=drop_last))
    kept = samples // plan.global_batch * plan.global_batch if drop_last else samples
    assert len([*chain(*steps)]) == len({*chain(*steps)}) == kept
    loaders = [_training(stream, plan, rank, drop_last=drop_last) for rank in range(replicas)]
    batches: list[list[list[int]]] = []
    weights = []
    for loader in loaders:
        batches.append([])
        weights.append([])
        for index, batch in enumerate(loader):
            batches[-1].append(batch.tolist())
            weights[-1].append(loader.sampler.weight_and_samples(*divmod(index, accumulation))[0])
    assert {len(read) for read in batches} == {len(steps) * accumulation}
    for step, expected in enumerate(steps):
        micros = range(step * accumulation, (step + 1) * accumulation)
        read = Counter(
            one for rank in range(replicas) for at in micros if weights[rank][at] for one in batches[rank][at]
        )
        assert read == Counter(expected)
        assert sum(weights[rank][at] for rank in range(replicas) for at in micros) == pytest.approx(
            replicas * accumulation
        )


@given(samples=st.integers(1, 60), replicas=st.integers(1, 5), batch=st.integers(1, 9))
def test_an_evaluation_reads_each_sample_once_in_equally_many_batches_a_rank(
    samples: int, replicas: int, batch: int
) -> None:
    if samples < replicas:
        return
    plan = BatchPlan(batch * replicas, batch, replicas, 1)
    loader = DataLoader(Stream(range(samples)), 9)
    ranks = [_ids(evaluation_loader(loader, RankShare(plan, rank, 1))) for rank in range(replicas)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(chain(*chain(*ranks))) == list(range(samples))
    assert all(part for rank in ranks for part in rank)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Stream, WorkerSplit])
def test_workers_change_nothing(kind: type[Stream], persistent: bool) -> None:
    plan = BatchPlan(8, 4, 2, 1)
    alone = _training(kind(range(37), 5), plan, 1)
    shared = _training(kind(range(37), 5), plan, 1, num_workers=2, persistent_workers=persistent)
    read: list[list[list[int]]] = []
    for epoch in range(2):
        for loader in (alone, shared):
            loader.sampler.set_epoch(epoch)
        torch.rand(3)
        read.append(_ids(alone))
        assert _ids(shared) == read[-1]
    assert (read[0] != read[1]) == (kind is Stream)  # which shuffles
    assert (shared._iterator is not None) == persistent


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stream, StatefulStream, SizedStream])
def test_a_resumed_stream_goes_on_at_any_step_under_another_cut(
    kind: type, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    whole = _ids(_training(kind(range(61)), BatchPlan(8, 8, 1, 1)))
    loader = _training(kind(range(61)), BatchPlan(8, 4, 1, 2), num_workers=workers)
    assert len(_ids(loader, 7)) == 7  # three steps and a half
    state = loader.sampler.state_at(3)
    assert (state["state"] is not None) == (kind is StatefulStream)
    stream = kind(range(61))
    resumed = _training(stream, BatchPlan(8, 8, 1, 1), at=Position(step=3), num_workers=workers)
    resumed.sampler.start_at(0, 3, state)
    assert _ids(resumed) == whole[3:]
    assert ("skipped    24 samples of a stream are read again" in caplog.text) == (kind is not StatefulStream)
    if kind is StatefulStream and not workers:
        assert stream.read == 61 - 24
    resumed.sampler.set_epoch(1)
    assert len(_ids(resumed)) == len(whole)


def test_no_more_is_read_than_the_global_batch_that_is_asked_for() -> None:
    stream = StatefulStream(range(50))
    next(iter(_training(stream, BatchPlan(8, 2, 2, 2))))
    assert stream.read == 8


def _take_from(worker: int) -> None:
    from torch.utils.data import get_worker_info

    dataset = get_worker_info().dataset
    dataset.samples = dataset.samples[worker * 10 :]


def test_workers_whose_worker_init_fn_splits_the_dataset_are_refused() -> None:
    loader = _training(Stream(range(40)), BatchPlan(4, 4, 1, 1), num_workers=2, worker_init_fn=_take_from)
    with pytest.raises(Refused, match="the workers of a data loader read different samples"):
        _ids(loader)


def test_an_evaluation_set_smaller_than_the_world_is_refused() -> None:
    loader = evaluation_loader(DataLoader(Stream(range(3)), 2), RankShare(BatchPlan(4, 1, 4, 1), 0, 1))
    with pytest.raises(Refused, match="3 samples of a set, which 4 devices can't share"):
        next(iter(loader))


def test_a_state_that_no_checkpoint_can_keep_is_left_out() -> None:
    class Odd(StatefulStream):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": torch.Generator()}

    loader = _training(Odd(range(20)), BatchPlan(4, 4, 1, 1))
    assert len(_ids(loader)) == 5
    assert loader.sampler.state_at(3)["state"] is None


def test_a_state_dict_that_needs_arguments_is_no_state() -> None:
    class Asking(StatefulStream):
        def state_dict(self, num_samples_yielded: int) -> dict[str, Any]:  # type: ignore[override]  # as litdata's
            return super().state_dict()

    loader = _training(Asking(range(20)), BatchPlan(4, 4, 1, 1))
    assert len(_ids(loader)) == 5
    assert loader.sampler.state_at(3)["state"] is None


@pytest.mark.parametrize(
    ("samples", "drop_last", "line"),
    [(0, False, "has no samples"), (5, True, "has fewer samples than global_batch_size=8")],
)
def test_a_training_stream_without_a_batch_is_refused(samples: int, drop_last: bool, line: str) -> None:
    with pytest.raises(Refused, match=line):
        _ids(_training(Stream(range(samples)), BatchPlan(8, 8, 1, 1), drop_last=drop_last))


@pytest.mark.parametrize("splits", [False, True])
def test_a_plan_takes_the_batch_of_a_stream_that_splits_itself(splits: bool) -> None:
    found = first_samples(PlainModel(), StreamData(batch_size=5), shares_streams=not splits)
    assert (found.is_cut, len(found.batch(3)[0])) == ((False, 5) if splits else (True, 3))


class ByNode(Stream):
    """As Hugging Face's split_dataset_by_node leaves it."""

    _distributed = (0, 2)


def test_a_stream_that_is_known_to_split_itself_is_left_as_it_is(tmp_path: Path) -> None:
    batch = GlobalBatch(BatchPlan(8, 8, 1, 1), seed=0)
    trainer = local_trainer(tmp_path, batch)
    trainer.strategy.connect(PlainModel())
    trainer.state.fn, trainer.validating = TrainerFn.FITTING, True
    batch.setup(trainer, trainer.lightning_module, "fit")
    left = DataLoader(ByNode(range(9)), 3)
    assert trainer.strategy.process_dataloader(left) is left
    assert trainer.strategy.process_dataloader(DataLoader(Stream(range(9)), 3)) is not left


def test_the_buffer_that_a_hugging_face_dataset_shuffles_in_is_no_part_of_its_state() -> None:
    class BufferShuffledExamplesIterable:
        pass

    class Mapped:
        ex_iterable = BufferShuffledExamplesIterable()

    stream = StatefulStream(range(9))
    stream._ex_iterable = Mapped()
    loader = _training(stream, BatchPlan(4, 4, 1, 1))
    assert len(_ids(loader)) == 3
    assert loader.sampler.state_at(2)["state"] is None


@pytest.mark.parametrize("kind", [Stream, Unseeded])
def test_a_resumed_stream_that_begins_with_other_samples_is_told(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    loader = _training(kind(range(61), 20), BatchPlan(8, 8, 1, 1))
    loader.sampler.set_epoch(2)
    _ids(loader, 4)
    resumed = _training(kind(range(61), 20), BatchPlan(8, 8, 1, 1), at=Position(epoch=2, step=3))
    resumed.sampler.start_at(2, 3, loader.sampler.state_at(3))
    _ids(resumed)
    assert ("starts with different samples than before" in caplog.text) == (kind is Unseeded)
