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
from lightswitch.errors import UnfitCheckpoint
from tests.engine.checkpoints import hostile
from tests.engine.checkpoints.damages import damage, flip_one
from tests.engine.conftest import PLAIN, runs_in
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
