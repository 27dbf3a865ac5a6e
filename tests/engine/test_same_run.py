"""Promise 2: the switch does not change the run. Each way to train has its tour in tours/test_tours.py."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.tiny import LANGUAGE, RECORD
from tests.runs import largest_difference

RUN = (
    *PLAIN,
    "global_batch_size=24",
    "trainer.max_steps=50",
    "trainer.val_check_interval=20",
    "trainer.log_every_n_steps=1",
    *RECORD,
)
SWITCHES = {  # words, and the ranks that are started
    "accumulation and two devices": (("strategy=ddp", "micro_batch_size=4"), 2),
    "loader workers": (("strategy=single", "data.workers=2"), 0),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*RUN, "strategy=single")


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_keeps_samples_losses_metrics_and_weights(switch: str, alone: Finished, train: Train) -> None:
    words, ranks = SWITCHES[switch]
    switched = train(*RUN, *words, ranks=ranks)

    for metric in ("train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy", "samples"):
        assert largest_difference(switched, alone, metric) <= 1e-5, metric
    assert len(switched.column("train/loss")) == 50
    assert _samples_of_steps(switched.run_dir) == _samples_of_steps(alone.run_dir)
    first, *others = (torch.load(path) for path in sorted(switched.run_dir.glob("weights_*.pt")))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_an_epoch_reads_each_sample_once(alone: Finished) -> None:
    steps = _samples_of_steps(alone.run_dir)
    epochs = [Counter() for _ in range(6)]
    for (epoch, _), ids in steps.items():
        epochs[epoch].update(ids)
    for epoch in epochs[:-1]:
        assert epoch == Counter(range(200))  # 8 full batches of 24 and one of 8
    assert alone.column("samples")[8] == 200
    assert tuple(range(24)) != steps[0, 0] != steps[1, 9], "each epoch has an order of its own"


@pytest.mark.nightly
def test_the_batches_of_a_batch_sampler_are_cut_and_the_run_is_the_same_after_a_resume(train: Train) -> None:
    run = (*RUN, "data._target_=tests.engine.plain.BucketsData", "callbacks.last_checkpoint.every_n_steps=7")
    whole = train(*run, "strategy=single", "run_id=whole")
    train(*run, "strategy=ddp", "micro_batch_size=6", "run_id=begun", "trainer.max_steps=35", ranks=2)
    resumed = train(*run, "strategy=single", "run_id=begun", "data.workers=2")
    assert [*resumed.column("train/loss")] == [*range(50)]
    for metric in ("train/loss", "val/loss", "val/accuracy", "samples"):
        assert largest_difference(resumed, whole, metric) <= 1e-5, metric
    assert _samples_of_steps(resumed.run_dir) == {
        place: samples
        for place, samples in _samples_of_steps(whole.run_dir).items()
        if place in _samples_of_steps(resumed.run_dir)
    }


@pytest.mark.nightly
def test_a_loader_that_splits_itself_runs_as_it_is_and_the_run_says_so(train: Train) -> None:
    words = ("data._target_=tests.engine.plain.BucketsData", "+data.sharded_by=dataset", "strategy=ddp")
    run = train(*RUN, *words, "trainer.max_steps=20", ranks=2)
    assert (
        "this data loader is left unchanged because its batch sampler splits the samples by rank "
        "(data.sharded_by=dataset): it sets its own batch size and order, and a resumed run restarts its epoch"
    ) in run.out
    first = _samples_of_steps(run.run_dir)[0, 0]
    assert first[::2] == first[1::2]


@pytest.mark.gpu
def test_a_deterministic_run_resumes_to_the_bit_on_a_gpu(train: Train) -> None:
    run = (*LANGUAGE, "scheduler=constant", "trainer.accelerator=gpu", "trainer.deterministic=true")
    whole = train(*run, "run_id=whole")
    begun = train(*run, "run_id=begun", "trainer.max_steps=30", "callbacks.last_checkpoint.every_n_steps=30")
    resumed = train(*run, "run_id=begun", folder=begun.folder)
    assert resumed.column("train/loss") == whole.column("train/loss")


def _samples_of_steps(run_dir: Path) -> dict[tuple[int, int], tuple[int, ...]]:
    """Sorted sample ids by (epoch, step), over all ranks and micro batches.

    A rank without a share of a last, small batch reads one sample at weight 0: it is not among the ids.
    """
    steps: dict[tuple[int, int], list[int]] = {}
    for path in sorted(run_dir.glob("samples_*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault((line["epoch"], line["step"]), []).extend(line["ids"])
    return {key: tuple(sorted(ids)) for key, ids in steps.items()}
