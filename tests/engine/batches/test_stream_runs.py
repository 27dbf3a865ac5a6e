"""Runs over a stream: the curve of one process under any strategy, and on from wherever they were stopped."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN_MODEL, Finished, Train, runs_in
from tests.engine.tiny import RECORD
from tests.night import at_night
from tests.runs import largest_difference

STREAM = (PLAIN_MODEL, "data._target_=tests.engine.batches.streams.StreamData", "trainer.accelerator=cpu")
SHORT = ("trainer.log_every_n_steps=1", "trainer.num_sanity_val_steps=0", *RECORD)
RUN = (*STREAM, *SHORT, "run_id=mine", "global_batch_size=24", "data.samples=107", "data.buffer=20", "data.noise=0.1")
STEPS = ("trainer.max_steps=12", "trainer.val_check_interval=6")  # of five in an epoch, the last of eleven samples
STOPPED = "trainer.max_steps=7"
KILLED = (
    "callbacks.last_checkpoint.every_n_steps=2",
    "callbacks.kill._target_=tests.engine.batches.streams.KillOnceSaved",
    "callbacks.kill.run_dir=${hydra:runtime.output_dir}",
)


def _samples(run_dir: Path) -> dict[int, Counter[int]]:
    """Of each step, what all ranks have read."""
    read: dict[int, Counter[int]] = {}
    for file in run_dir.glob("samples_*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            read.setdefault(line["step"], Counter()).update(line["ids"])
    return read


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    run = runs_in(tmp_path_factory.mktemp("alone"))
    return {kind: run(*RUN, *STEPS, f"data.kind={kind}", "strategy=single") for kind in ("plain", "stateful")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [("ddp", 2, ("micro_batch_size=4",)), *at_night(("fsdp", 3, ("data.workers=2",)))],
)
def test_a_stream_has_the_curve_of_one_process(
    strategy: str, ranks: int, more: tuple[str, ...], alone: dict[str, Finished], train: Train
) -> None:
    split = train(*RUN, *STEPS, f"strategy={strategy}", *more, ranks=ranks)
    for metric in ("train/loss", "val/loss", "val/accuracy", "test/accuracy", "samples"):
        assert largest_difference(split, alone["plain"], metric) <= 1e-5, metric
    assert alone["plain"].column("samples")[4] == 107
    if "micro_batch_size=4" not in more:  # else an empty slice of a last step reads a sample at weight 0
        assert _samples(split.run_dir) == _samples(alone["plain"].run_dir)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["stateful", *at_night("plain")])
def test_a_killed_stream_goes_on_under_another_strategy_and_world_size(
    kind: str, alone: dict[str, Finished], train: Train
) -> None:
    run = (*RUN, *STEPS, f"data.kind={kind}")
    killed = train(*run, *KILLED, "strategy=deepspeed_stage_2", ranks=2, check=False)
    assert killed.returncode == -9, killed.err
    resumed = train(*run, "strategy=fsdp", "micro_batch_size=8", ranks=3, folder=killed.folder)
    for metric in ("train/loss", "samples", "val/loss"):
        assert largest_difference(resumed, alone[kind], metric) <= 1e-5, metric
    assert re.search(r"resumes .*at step \d", resumed.out)
    assert bool(re.search(r"skipped +\d+ samples of a stream", resumed.out)) == (kind == "plain")


def test_a_killed_stream_goes_on_at_its_sample_to_the_bit(alone: dict[str, Finished], train: Train) -> None:
    run = (*RUN, *STEPS, "data.kind=stateful", "data.workers=2", "strategy=single")
    killed = train(*run, *KILLED, check=False)
    assert killed.returncode == -9, killed.err
    resumed = train(*run, folder=killed.folder)
    assert re.search(r"resumes .*at step \d", resumed.out)
    for metric in ("train/loss", "val/loss", "samples", "test/accuracy"):
        assert resumed.column(metric) == alone["stateful"].column(metric), metric


@pytest.mark.nightly
def test_a_stream_goes_on_where_its_first_batch_was_read_before_the_checkpoint(
    alone: dict[str, Finished], train: Train
) -> None:
    run = (*RUN, "model._target_=tests.engine.batches.streams.AskingModel", "trainer.max_epochs=9")
    first = train(*run, STOPPED, "trainer.val_check_interval=6")
    resumed = train(*run, *STEPS, folder=first.folder)
    assert largest_difference(resumed, alone["plain"]) <= 1e-5


@pytest.mark.nightly
def test_a_stream_that_splits_itself_by_ranks_is_refused_until_that_is_declared(train: Train) -> None:
    run = (
        *STREAM,
        *SHORT,
        "data.kind=ranks",
        "data.batch_size=8",
        "trainer.max_steps=2",
        "trainer.val_check_interval=2",
    )
    refused = train(*run, ranks=2, check=False)
    assert refused.returncode == 2
    assert "the ranks read different samples of a stream" in refused.err
    declared = train(*run, "data.sharded_by=dataset", ranks=2)
    assert "batch      of each device's data loader × accumulation 1" in declared.out
    read = _samples(declared.run_dir)
    assert {step: sorted(ids) for step, ids in read.items()} == {0: [*range(16)], 1: [*range(16, 32)]}


@pytest.mark.nightly
def test_a_schedule_that_epochs_of_a_stream_do_not_bound_is_refused(train: Train) -> None:
    run = (*STREAM, "model._target_=tests.engine.plain.CycleModel", "trainer.max_epochs=2")
    refused = train(*run, check=False)
    assert (refused.returncode, len(refused.err.splitlines())) == (2, 1)
    assert "type trainer.max_steps=N, or give the dataset a __len__" in refused.err
    sized = train(*run, "data.kind=sized", "data.samples=70", "trainer.log_every_n_steps=1")
    assert len(sized.column("train/loss")) == 4
