"""The newest good checkpoint of a run."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lightswitch.batches.position import KEY, Position
from lightswitch.checkpoints.find import newest


def write(path: Path, **position: int | bool) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save({"state_dict": {"w": torch.zeros(1000)}, KEY: asdict(Position(**position))}, path)
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


@pytest.mark.parametrize("kept", [0, 1, 100, 2000, -1])
def test_a_file_that_was_cut_short_is_passed_over_with_a_word(
    kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(tmp_path / "checkpoints" / "best.ckpt", global_step=10)
    cut = write(tmp_path / "checkpoints" / "last.ckpt", global_step=20)
    cut.write_bytes(cut.read_bytes()[:kept])
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == (good, Position(global_step=10))
    assert f"{cut} can't be read and is passed over: " in caplog.text


def test_a_checkpoint_of_something_else_and_a_partial_one_are_no_candidates(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "checkpoints" / "foreign.ckpt")
    write(tmp_path / "checkpoints" / "last.ckpt.partial", global_step=20)
    assert newest(tmp_path) is None
