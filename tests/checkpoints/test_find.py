"""The newest good checkpoint of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lightswitch.batches.position import KEY, Position
from lightswitch.checkpoints import directory
from lightswitch.checkpoints.find import first_whole, newest, up_to


def write(path: Path, **position: int | bool) -> Path:
    directory.write(path, {"model.w": torch.zeros(1000)}, {KEY: asdict(Position(**position))}, ranks=None)
    return path


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest(tmp_path) is None


def test_the_furthest_in_training_is_found_whatever_its_name_or_time(tmp_path: Path) -> None:
    furthest = write(tmp_path / "checkpoints" / "best.ckpt", global_step=30)
    write(tmp_path / "checkpoints" / "last.ckpt", global_step=20)
    write(tmp_path / "hpc_ckpt_1.ckpt", global_step=10)
    found = newest(tmp_path)
    assert found is not None
    assert (found[0], found[1].global_step) == (furthest, 30)


def test_a_checkpoint_that_a_scheduler_asked_for_counts(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints" / "last.ckpt", global_step=20)
    asked = write(tmp_path / "hpc_ckpt_1.ckpt", global_step=25)
    assert newest(tmp_path) == (asked, Position(global_step=25))


def test_of_two_at_a_step_the_validated_one_is_taken(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints" / "last.ckpt", global_step=20, validation_due=True)
    validated = write(tmp_path / "checkpoints" / "best.ckpt", global_step=20)
    assert newest(tmp_path) == (validated, Position(global_step=20))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, flip, empty, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "trainer.pt", "SHA256SUMS"])
def test_a_harmed_checkpoint_is_passed_over_with_a_word(
    name: str, harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(tmp_path / "checkpoints" / "best.ckpt", global_step=10)
    harmed = write(tmp_path / "checkpoints" / "last.ckpt", global_step=20)
    harm(harmed / name)
    with caplog.at_level(logging.WARNING):
        found, _ = newest(tmp_path)
        assert first_whole(up_to(found, tmp_path), group=None).path == good
    assert caplog.text.count(f"{harmed} can't be read as a checkpoint: ") == 1


def test_between_two_renames_the_one_before_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints" / "last.ckpt", global_step=10)
    path.rename(directory.previous(path))
    assert newest(tmp_path) == (directory.previous(path), Position(global_step=10))


def test_a_checkpoint_of_something_else_and_a_partial_one_are_no_candidates(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "checkpoints" / "foreign.ckpt")
    write(tmp_path / "checkpoints" / "last.ckpt", global_step=20).rename(tmp_path / "checkpoints" / "last.ckpt.partial")
    assert newest(tmp_path) is None
