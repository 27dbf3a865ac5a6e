"""Promise 2: a checkpoint saved under one strategy and world size goes on under any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.tables.resume import END, difference, go_on
from tests.engine.ways import WAYS

STOPS = (3, 5, 7, 10, 13, END)  # steps; a validation follows every fourth


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return go_on(runs_in(tmp_path_factory.mktemp("uninterrupted")), "single", None)


ROUND = [*WAYS, "single"]


@pytest.mark.parametrize("first", [0, 5, 10])
def test_a_run_goes_on_under_one_strategy_after_another(first: int, uninterrupted: Finished, train: Train) -> None:
    """Each way is left once and entered once; docs/checkpoints.md has all pairs."""
    ways = ROUND[first : first + 6]
    run = None
    for way, stop in zip(ways, STOPS[-len(ways) :], strict=True):
        run = go_on(train, way, run and run.folder, stop)
    assert run is not None
    assert difference(uninterrupted, run) <= 1e-5


# What is found to differ between a checkpoint and the run that is to go on from it

SHORT = (*PLAIN, "run_id=mine", "trainer.accelerator=cpu", "trainer.val_check_interval=100", "strategy=single")
OTHERS = {
    "model.width=32": "was saved from a different model: model.width was 16, is 32; "
    "net.0.weight is 16×2 in the checkpoint and 32×2 in the model; ",
    "data.samples=201": "can't be resumed: it was trained on 200 samples, and the training set has 201 now; ",
    "seed=7": "can't be resumed: it was trained with seed=42, this run has 7; ",
    "global_batch_size=32": "can't be resumed: it was trained with global_batch_size=64, this run has 32; ",
    "model._target_=tests.engine.plain.SGDModel": "holds the state of AdamW over 4 parameters (net.0.weight, …), "
    "and this run has SGD over 4 parameters (net.0.weight, …); ",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = runs_in(tmp_path_factory.mktemp("saved"))(*SHORT, "trainer.max_steps=4")
    return run.run_dir / "checkpoints" / "step_4.ckpt"


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_is_told_in_a_line(other: str, saved: Path, train: Train) -> None:
    refused = train(*SHORT, f"resume={saved}", other, "trainer.max_steps=6", check=False)
    (line,) = (line for line in refused.err.splitlines() if line.startswith("error"))
    assert line.startswith(f"error: {saved} {OTHERS[other]}")
    assert "Traceback" not in refused.err
    assert refused.returncode == 2


@pytest.mark.parametrize(
    "other", ["data.samples=201", "global_batch_size=32", "model._target_=tests.engine.plain.SGDModel"]
)
def test_a_run_can_start_from_the_weights_alone(other: str, saved: Path, train: Train) -> None:
    begun = train(*SHORT, f"init_from={saved}", other, "trainer.max_steps=6", "trainer.log_every_n_steps=1")
    fresh = train(*SHORT, other, "trainer.max_steps=6", "trainer.log_every_n_steps=1")
    assert list(begun.column("train/loss")) == [0, 1, 2, 3, 4, 5]
    assert begun.column("train/loss")[0] < fresh.column("train/loss")[0] - 0.1


def test_a_run_started_again_goes_on_and_not_from_the_initial_weights(saved: Path, train: Train) -> None:
    first = train(*SHORT, f"init_from={saved}", "trainer.max_steps=6", "trainer.log_every_n_steps=1")
    again = train(
        *SHORT, f"init_from={saved}", "trainer.max_steps=8", "trainer.log_every_n_steps=1", folder=first.folder
    )
    whole = train(*SHORT, f"init_from={saved}", "trainer.max_steps=8", "trainer.log_every_n_steps=1")
    assert again.column("train/loss") == whole.column("train/loss")


def test_a_run_that_starts_anew_leaves_the_checkpoints_of_the_one_before(saved: Path, train: Train) -> None:
    first = train(*SHORT, "trainer.max_steps=6")
    anew = train(*SHORT, "trainer.max_steps=2", "resume=never", folder=first.folder)
    names = {path.relative_to(anew.run_dir).as_posix() for path in anew.run_dir.glob("checkpoints*/step_*")}
    assert names == {"checkpoints/step_2.ckpt", "checkpoints_1/step_6.ckpt"}


HARMED = (*SHORT, "strategy=ddp", "callbacks.last_checkpoint.every_n_steps=2", "trainer.max_steps=4")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("of_two"))(*HARMED, ranks=2)


@pytest.mark.parametrize("harmed", [["step_4"], ["step_4", "step_2"]], ids=["the newest", "all"])
def test_every_rank_knows_which_checkpoints_are_harmed(
    harmed: list[str], of_two: Finished, train: Train, tmp_path: Path
) -> None:
    """One bit of a tensor's file: nothing but its checksum tells."""
    shutil.copytree(of_two.folder, tmp_path / "again", symlinks=True)
    for name in harmed:
        flip_a_bit(tmp_path / "again" / f"runs/plainmodel/mine/checkpoints/{name}.ckpt/__1_0.distcp")
    again = train(*HARMED, "trainer.max_steps=5", ranks=2, folder=tmp_path / "again", check=False)
    damage = "can't be read as a checkpoint: __1_0.distcp differs from its checksum"
    told = [f"runs/plainmodel/mine/checkpoints/{name}.ckpt {damage}" for name in harmed]
    if len(harmed) == 2:
        advice = "start anew with resume=never, or go on from another with resume=PATH"
        assert again.err.splitlines()[0] == f"error: {'; '.join([*told, advice])}"
        assert again.returncode == 2
    else:
        assert f"{told[0]}; it is passed over\nresumes    runs/plainmodel/mine/checkpoints/step_2.ckpt\n" in again.out
        assert (again.returncode, again.out.count(told[0])) == (0, 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
