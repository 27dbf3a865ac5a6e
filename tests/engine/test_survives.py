"""Promise 3: the run survives. Started again under its id, it goes on exactly where it stood."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN, PLAIN_DATA, Finished, Train, runs_in
from tests.engine.failures.pace import FAILS_ONCE
from tests.night import at_night

RUN = (
    *PLAIN,
    "model.dropout=0.3",  # a resumed run must draw what the uninterrupted one draws
    "run_id=mine",
    "global_batch_size=24",
    "trainer.val_check_interval=8",
    "trainer.log_every_n_steps=1",
    "callbacks.last_checkpoint.every_n_steps=4",
)
KEPT = ("samples", "train/loss", "val/loss", "val/accuracy", "test/loss")
STEPS = 40  # of 9 an epoch


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("uninterrupted"))(*RUN, f"trainer.max_steps={STEPS}")


@pytest.mark.parametrize(
    ("stops", "switches"),
    [
        pytest.param([4], ((), ()), id="in an epoch", marks=pytest.mark.nightly),
        pytest.param([9], ((), ()), id="at an epoch's end"),
        pytest.param([8], ((), ()), id="at a validation", marks=pytest.mark.nightly),
        pytest.param([13], (("micro_batch_size=6", "data.workers=2"), ("micro_batch_size=6",)), id="with accumulation"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    stops: list[int], switches: tuple[tuple[str, ...], ...], uninterrupted: Finished, train: Train
) -> None:
    reference = uninterrupted
    if "micro_batch_size=6" in switches[0]:  # dropout draws anew for each micro batch
        reference = train(*RUN, f"trainer.max_steps={STEPS}", *switches[1])
    resumed = None
    for stop, switch in zip([*stops, STEPS], switches, strict=True):
        resumed = train(*RUN, f"trainer.max_steps={stop}", *switch, folder=resumed and resumed.folder)
    assert resumed is not None
    assert "resumes    runs/plainmodel/mine/checkpoints/" in resumed.out
    for name in KEPT[:-1]:
        assert resumed.column(name) == reference.column(name), name
    *_, whole = resumed.column("test/loss").items()  # each start has tested its best checkpoint
    assert [whole] == [*reference.column("test/loss").items()]


@pytest.mark.parametrize("strategy", ["single", *at_night("fsdp")])
def test_a_module_that_asks_how_long_the_run_is_goes_on_in_the_same_order(strategy: str, train: Train) -> None:
    """For which Lightning makes the training loader before the checkpoint is read, under a strategy that shards."""
    epochs = (*RUN, "model._target_=tests.engine.plain.CycleModel", f"strategy={strategy}", "trainer.max_epochs=4")
    record = ("callbacks.record._target_=tests.engine.plain.Record", "callbacks.record.folder=.")
    fails = (FAILS_ONCE, "callbacks.fails.step=14")
    alone = train(*epochs, *record)
    begun = train(*epochs, *record, *fails, check=False)
    resumed = train(*epochs, *record, *fails, folder=begun.folder)
    assert "resumes    runs/cyclemodel/mine/checkpoints/step_12.ckpt" in resumed.out
    trained = [(run.folder / "samples_0.jsonl").read_text().splitlines() for run in (alone, resumed)]
    assert set(trained[1]) == set(trained[0])
    assert resumed.column("train/loss") == alone.column("train/loss")


def test_a_finished_run_started_again_does_nothing_on_any_rank(uninterrupted: Finished, train: Train) -> None:
    written = _written(uninterrupted)
    again = train(*RUN, f"trainer.max_steps={STEPS}", folder=uninterrupted.folder, ranks=2)
    finished, go_on = again.out.splitlines()
    assert finished == f"finished   fit and test have ended at step {STEPS}; resume=never starts anew"
    assert go_on.endswith(f"run_id=mine trainer.max_steps={2 * STEPS}")
    assert _written(again) == written


def _written(run: Finished) -> dict[Path, int]:
    files = {path for path in run.run_dir.rglob("*") if path.name != "train.log"}
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.nightly
def test_a_run_that_was_killed_in_its_test_tests_and_trains_nothing(train: Train) -> None:
    killed = train(*RUN, "trainer.max_steps=8", "callbacks.kill._target_=tests.engine.plain.KilledInTest", check=False)
    assert killed.returncode == 9
    losses = killed.column("train/loss")
    again = train(*RUN, "trainer.max_steps=8", folder=killed.folder)
    assert "tests      runs/plainmodel/mine/checkpoints/best.ckpt" in again.out
    assert (again.column("train/loss"), list(again.column("test/loss"))) == (losses, [8])


def test_another_batch_or_seed_is_refused_and_never_and_a_path_are_the_alternatives(train: Train) -> None:
    first = train(*RUN, "trainer.max_steps=8")
    refused = train(*RUN, "global_batch_size=48", "trainer.max_steps=9", folder=first.folder, check=False)
    assert refused.returncode == 2
    assert refused.err == (
        "error: runs/plainmodel/mine/checkpoints/step_8.ckpt can't be resumed: it was trained with "
        "global_batch_size=24, this run has 48; start anew with resume=never or another run_id, or from its weights "
        "alone with init_from=runs/plainmodel/mine/checkpoints/step_8.ckpt and another run_id\n"
    )
    path = first.run_dir / "checkpoints" / "last.ckpt"
    moved = train(*RUN, "run_id=other", f"resume={path}", "trainer.max_steps=10", "name=elsewhere")
    assert sorted(moved.column("train/loss")) == [8, 9]
    anew = train(*RUN, "resume=never", "trainer.max_steps=3", folder=first.folder)
    assert sorted(anew.column("train/loss")) == [0, 1, 2]


def test_a_schedule_by_validation_steps_in_the_epoch_that_a_run_resumes_in(train: Train) -> None:
    plateau = ("++model._target_=tests.engine.plain.PlateauModel", PLAIN_DATA, "run_id=mine", "global_batch_size=40")
    plateau += ("trainer.check_val_every_n_epoch=1",)
    first = train("~model", *plateau, "trainer.log_every_n_steps=1", "trainer.max_steps=7")
    resumed = train("~model", *plateau, "trainer.log_every_n_steps=1", "trainer.max_steps=15", folder=first.folder)
    rates = resumed.column("lr-SGD")
    assert [rates[step] for step in range(15)] == [0.05 / 2 ** (step // 5) for step in range(15)]  # of 5 an epoch


@pytest.mark.parametrize(
    ("schedule", "ends", "halved", "batches"),  # five steps are an epoch; a schedule's steps are counted in each
    [
        *(*at_night(("epoch every 2", (5, 10, 12), {10}, ())), ("step every 5", (5, 12), {5, 10}, ())),
        *at_night(("step every 2", (2, 8), {2, 4, 7}, ("micro_batch_size=10", "data.samples=190"))),  # the fifth has 30
    ],
)
def test_a_schedule_by_validation_keeps_its_frequency_over_a_resume(
    schedule: str, ends: tuple[int, ...], halved: set[int], batches: tuple[str, ...], train: Train
) -> None:
    interval, _, frequency = schedule.split()
    run = ("++model._target_=tests.engine.plain.PlateauModel", "~model", PLAIN_DATA, "global_batch_size=40")
    run += (f"+model.interval={interval}", f"+model.frequency={frequency}", "run_id=mine")
    run += ("trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=1", "trainer.log_every_n_steps=1")
    run += (f"callbacks.last_checkpoint.every_n_steps={ends[0]}", *batches)
    folder, rates = None, {}
    for end in ends:
        resumed = train(*run, f"trainer.max_steps={end}", folder=folder)
        folder, rates = resumed.folder, rates | resumed.column("lr-SGD")
    assert rates == {step: 0.05 / 2 ** sum(step >= first for first in halved) for step in range(ends[-1])}


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_1"])
def test_a_batch_norm_goes_on_with_the_statistics_of_rank_0(strategy: str, train: Train) -> None:
    run = ("model._target_=tests.engine.plain.NormedModel", PLAIN_DATA, "global_batch_size=40", "run_id=mine")
    run += (f"strategy={strategy}", "trainer.val_check_interval=4")
    whole = train(*run, "trainer.max_steps=4", ranks=2)
    begun = train(*run, "trainer.max_steps=3", ranks=2)
    resumed = train(*run, "trainer.max_steps=4", ranks=2, folder=begun.folder)
    assert resumed.column("val/loss") == whole.column("val/loss")
