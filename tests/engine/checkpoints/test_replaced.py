"""A checkpoint of a run that goes on, read while the run replaces it: one, whole, or a line that says to try again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightswitch.checkpoints import directory
from lightswitch.checkpoints.last import position_of
from lightswitch.checkpoints.reading import Reader
from lightswitch.errors import UnfitCheckpoint


def _write(path: Path, value: float) -> None:
    tensors = {f"model.{name}": torch.full((2,), value) for name in ("a", "b", "c")}
    directory.write(path, tensors, {"hyper_parameters": {}}, None)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_checkpoint_that_is_replaced_or_removed_between_two_reads_is_refused(
    is_replaced: bool, tmp_path: Path
) -> None:
    path = tmp_path / "best.ckpt"
    _write(path, 1.0)
    reader = Reader(path, group=None)
    reader.read("model.a")
    _write(path, 2.0) if is_replaced else directory.remove(path)
    with pytest.raises(UnfitCheckpoint, match=r"a run in progress replaced or removed it during the read; try again"):
        reader.read("model.b")


def test_a_link_that_is_moved_between_two_reads_is_read_to_the_end_where_it_led(tmp_path: Path) -> None:
    _write(tmp_path / "step_1.ckpt", 1.0)
    _write(tmp_path / "step_2.ckpt", 2.0)
    link = tmp_path / "last.ckpt"
    link.symlink_to("step_1.ckpt")
    reader = Reader(link, group=None)
    link.unlink()
    link.symlink_to("step_2.ckpt")
    assert torch.cat(list(reader.read_weights().values())).eq(1).all()


def test_what_a_killed_process_was_writing_is_finished_or_removed(tmp_path: Path) -> None:
    for name in ("best.ckpt.previous", "step_1.ckpt", "step_1.ckpt.previous", "step_2.ckpt.partial", "own.ckpt.bak"):
        _write(tmp_path / name, 1.0)
    (tmp_path / "step_3.ckpt.partial").mkdir()  # killed before the mark
    (tmp_path / "last.ckpt.partial").symlink_to("step_1.ckpt")
    directory.finish_changes(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "step_1.ckpt", "own.ckpt.bak"}
    assert position_of(tmp_path / "best.ckpt") is None


def test_a_checkpoint_is_whole_or_gone_however_far_its_removal_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step_1.ckpt"
    _write(path, 1.0)
    files, seen = {file.name for file in path.iterdir()}, list[bool]()
    unlink = Path.unlink

    def looks(file: Path, missing_ok: bool = False) -> None:
        seen.append(not path.exists() or {other.name for other in path.iterdir()} == files)
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", looks)
    directory.remove(path)
    assert len(seen) >= len(files) - 1
    assert all(seen)
    assert list(tmp_path.iterdir()) == []
