"""Thousands of checkpoints that are damaged at random: none is read wrongly, none stops the run.

The seed of a failure is in its message; the same seed does the same again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from lightswitch.checkpoints.format import SUMS
from lightswitch.checkpoints.last import checkpoints_up_to, first_whole, newest
from lightswitch.checkpoints.reading import Reader
from lightswitch.checkpoints.weight_files import Weights
from lightswitch.errors import UnfitCheckpoint
from tests.engine.checkpoints import hostile
from tests.engine.checkpoints.damages import OF_A_FILE, damage, flip_one
from tests.engine.conftest import PLAIN, Train, runs_in
from tests.night import at_night

BATCH = 100
RUN = (*PLAIN, "trainer.accelerator=cpu", "strategy=ddp", "run_id=mine", "callbacks.last_checkpoint.every_n_steps=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks: a run's checkpoints at steps 2 and 4."""
    train = runs_in(tmp_path_factory.mktemp("trained"))
    run = train(*RUN, "trainer.max_steps=4", "trainer.val_check_interval=100", ranks=2)
    return run.run_dir / "checkpoints"


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, *at_night(*range(BATCH, 2000, BATCH))])
def test_a_damaged_checkpoint_is_passed_over_or_it_is_what_was_written(
    first: int, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {path.name: whole(Reader(path, group=None)) for path in trained.glob("step_*.ckpt")}
    states = {path.parent.name: path.read_bytes() for path in trained.glob("step_*.ckpt/trainer.pt")}
    for seed in range(first, first + BATCH):
        caplog.clear()
        with copied(trained) as run_dir:
            done = damage(Random(seed), run_dir / "checkpoints" / "step_4.ckpt")
            with told(seed, done), as_nobody("forbid" in str(done)):
                found = newest(run_dir)
                assert found is not None
                reader = first_whole(checkpoints_up_to(found[0], run_dir), group=None)
                assert same(whole(reader), expected[reader.path.name]), "it is read wrongly"
                assert (reader.path / "trainer.pt").read_bytes() == states[reader.path.name]
                passed_over = "step_4.ckpt can't be read as a checkpoint: " in caplog.text
                assert passed_over == (reader.path.name == "step_2.ckpt"), "it is passed over without a word"


FLIPS = 264


@pytest.mark.parametrize("is_signed", [False, True])
def test_no_flipped_bit_is_read_as_what_was_written(is_signed: bool, tmp_path: Path) -> None:
    """Its checksum finds it; of whoever signs what he has changed, what is wrong is refused, and no more happens."""
    good, path = hostile.ours(tmp_path / "good.ckpt"), tmp_path / "x.ckpt"
    names = [
        file.name for file in sorted(good.iterdir()) if file.stat().st_size and (not is_signed or file.name != SUMS)
    ]
    for seed in range(FLIPS):
        shutil.copytree(good, path, dirs_exist_ok=True)
        flip_one(Random(seed), path / names[seed % len(names)])
        with (
            told(seed, names),
            pytest.raises(UnfitCheckpoint) if not is_signed else contextlib.suppress(UnfitCheckpoint),
        ):
            whole(Reader(hostile.sign(path) if is_signed else path, group=None))


@pytest.mark.parametrize("kind", ["ours", "file", "file of old"])
def test_damaged_weights_are_read_or_refused_in_a_line(kind: str, tmp_path: Path) -> None:
    """What Lightning writes has no checksums: a number may have changed, but nothing else may happen."""
    weights_of(kind, tmp_path / "good")
    for seed in range(50):
        with copied(tmp_path / "good") as folder:
            path = folder / "checkpoints" / "x.ckpt"
            harmed = path if path.is_file() else Random(seed).choice([f for f in path.rglob("*") if f.is_file()])
            harm = Random(seed).choice(OF_A_FILE[:5])
            harm(Random(seed), harmed)
            with told(seed, [f"{harm.__name__} {harmed.name}"]):
                try:
                    weights = Weights(path)
                    weights.read(weights.like)
                except UnfitCheckpoint as refused:
                    assert "\n" not in str(refused)  # noqa: PT017  # it need not be refused


def weights_of(kind: str, folder: Path) -> None:
    path = folder / "x.ckpt"
    if kind == "ours":
        hostile.ours(path)
    if kind.startswith("file"):
        folder.mkdir()
        is_zip = kind == "file"
        torch.save({"state_dict": {"w": torch.rand(100)}}, path, _use_new_zipfile_serialization=is_zip)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [3, *at_night(*range(7, 24, 4))])
def test_a_run_goes_on_whatever_happened_to_its_newest_checkpoint(seed: int, trained: Path, train: Train) -> None:
    with copied(trained) as run_dir:
        done = damage(Random(seed), run_dir / "checkpoints" / "step_4.ckpt")
        folder = run_dir.parent / "again"
        (folder / "runs" / "plainmodel").mkdir(parents=True)
        run_dir.rename(folder / "runs" / "plainmodel" / "mine")
        run = train(*RUN, "trainer.max_steps=5", "strategy=single", folder=folder)
        assert "resumes    runs/plainmodel/mine/checkpoints/step_" in run.out, f"seed {seed}: {done}"
        assert "Traceback" not in run.err
        assert "step 5/5" in run.out


@contextlib.contextmanager
def copied(checkpoints: Path) -> Iterator[Path]:
    """A run's directory, which anybody may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        run_dir = Path(folder) / "run"
        shutil.copytree(checkpoints, run_dir / "checkpoints", symlinks=True)
        yield run_dir


@contextlib.contextmanager
def as_nobody(wanted: bool) -> Iterator[None]:
    """To root, nothing is forbidden."""
    changed = wanted and os.geteuid() == 0
    if changed:
        os.seteuid(65534)
    try:
        yield
    finally:
        if changed:
            os.seteuid(0)


@contextlib.contextmanager
def told(seed: int, done: list[str]) -> Iterator[None]:
    try:
        yield
    except UnfitCheckpoint:
        raise
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {'; '.join(done)}: {type(error).__name__}: {error}") from error


def whole(reader: Reader) -> dict[str, Tensor]:
    tensors = {name: torch.empty_like(like, device="cpu") for name, like in reader.like.items()}
    reader.fill(tensors)
    return tensors


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in found.items())
