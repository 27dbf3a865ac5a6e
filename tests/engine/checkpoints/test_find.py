"""The newest good checkpoint of a run."""

from __future__ import annotations

import logging
import pickle
import shutil
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lightswitch.batches.plan import KEY, Position
from lightswitch.checkpoints import before, directory
from lightswitch.checkpoints.last import checkpoints_up_to, first_whole, newest
from lightswitch.errors import UnfitCheckpoint
from tests.engine.checkpoints import damages, hostile
from tests.engine.checkpoints.damages import Damage


def write(path: Path, **position: int | bool) -> Path:
    directory.write(path, {"model.w": torch.zeros(1000)}, {KEY: asdict(Position()) | position}, ranks=None)
    return path


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({}, None),
        ({"checkpoints/best.ckpt": 30, "checkpoints/last.ckpt": 20, "beside.ckpt": 40}, "checkpoints/best.ckpt"),
        ({"checkpoints/last.ckpt.previous": 10}, "checkpoints/last.ckpt.previous"),  # between two renames
        ({"checkpoints/last.ckpt.partial": 10}, None),
    ],
)
def test_the_furthest_in_training_is_found_whatever_its_name_or_time(
    written: dict[str, int], found: str | None, tmp_path: Path
) -> None:
    for name, step in written.items():
        write(tmp_path / name, global_step=step)
    assert newest(tmp_path) == (found and (tmp_path / found, Position(global_step=written[found])))


class _PythonBefore3_11_4(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_checkpoint_that_an_older_python_has_written_is_read(tmp_path: Path) -> None:
    path = Path(shutil.copytree(hostile.BEFORE, tmp_path / "last.ckpt"))
    index = pickle.loads((path / ".metadata").read_bytes())
    with (path / ".metadata").open("wb") as file:
        _PythonBefore3_11_4(file).dump(index)
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert "model.seen" in before.read_index(path).like


HARMS: list[Damage] = [
    *(damages.truncate, damages.flip, damages.delete, damages.put_a_directory),
    *(partial(damages.put_a_link, targets=(target,)) for target in ("nowhere", damages.UNREADABLE)),
    damages.lose_it_and_its_line,
]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["tensors_0.bin", "index.json", "trainer.pt", "SHA256SUMS"])
def test_a_harmed_checkpoint_is_passed_over_with_a_word(
    name: str, harm: Damage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(tmp_path / "checkpoints" / "best.ckpt", global_step=10)
    harmed = write(tmp_path / "checkpoints" / "last.ckpt", global_step=20)
    harm(Random(name), harmed / name)
    with caplog.at_level(logging.WARNING):
        found, _ = newest(tmp_path)
        assert first_whole(checkpoints_up_to(found, tmp_path), group=None).path == good
    assert caplog.text.count(f"{harmed} can't be read as a checkpoint: ") == 1


NO_INDEX = "index.json is not an index of tensors"
EDITED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # of a tensor, of its shard, and the line
    "a negative size": ({"shape": [-1000]}, {}, NO_INDEX),
    "a size that torch can't hold": ({"shape": [0, 1 << 70]}, {}, NO_INDEX),
    "no dtype": ({"dtype": "nn"}, {}, NO_INDEX),
    "no list": ({"shards": {"file": "tensors_0.bin"}}, {}, NO_INDEX),
    "a file without a checksum": ({}, {"file": "x.bin"}, "SHA256SUMS has no checksum of x.bin"),
    "2^44 numbers": ({"shape": [1 << 44]}, {"shape": [1 << 44]}, "tensors_0.bin is shorter than index.json says"),
    "a part of the numbers": ({"shape": [1001]}, {}, "index.json has 1000 of the 1001 elements of model.w"),
    "a part that lies outside": ({}, {"offset": [1]}, "index.json has a shard outside of model.w"),
    "a place beyond the file": ({}, {"bytes": [1 << 40, 4000 + (1 << 40)]}, "tensors_0.bin is shorter than index.json"),
    "no place": ({"shards": []}, {}, "index.json has 0 of the 1000 elements of model.w"),
}


@pytest.mark.parametrize("what", EDITED)
def test_an_index_that_does_not_fit_its_files_is_passed_over(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_tensor, of_shard, line = EDITED[what]

    def edit(tensors: Any) -> None:
        (shard,) = tensors["model.w"]["shards"]
        shard |= of_shard
        tensors["model.w"] |= of_tensor

    good = write(tmp_path / "checkpoints" / "best.ckpt", global_step=10)
    harmed = write(tmp_path / "checkpoints" / "last.ckpt", global_step=20)
    shutil.copy(harmed / "tensors_0.bin", harmed / "x.bin")
    hostile.edit_index(harmed, edit)
    with caplog.at_level(logging.WARNING):
        found = newest(tmp_path)
        assert found == (good, Position(global_step=10))
    assert f"{harmed} can't be read as a checkpoint: {line}" in caplog.text


@pytest.mark.parametrize("position", [{"global_step": "20"}, {"odd": 1}, [], None])
def test_a_position_that_is_none_is_damage(position: Any, tmp_path: Path) -> None:
    directory.write(tmp_path / "checkpoints" / "last.ckpt", {"model.w": torch.zeros(2)}, {KEY: position}, ranks=None)
    with pytest.raises(UnfitCheckpoint, match=r"last\.ckpt can't be read as a checkpoint: "):
        newest(tmp_path)


def test_a_folder_that_cant_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    """A run would start anew over what it has."""
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UnfitCheckpoint, match="checkpoints can't be listed: Not a directory"):
        newest(tmp_path)


def test_files_and_links_beside_them_are_something_elses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = write(tmp_path / "checkpoints" / "step_2.ckpt", global_step=2)
    (tmp_path / "checkpoints" / "note.ckpt").write_text("mine")
    torch.save({"state_dict": {}}, tmp_path / "checkpoints" / "foreign.ckpt")
    (tmp_path / "checkpoints" / "gone.ckpt").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == (good, Position(global_step=2))
    assert not [name for name in ("note.ckpt", "foreign.ckpt") if name in caplog.text]


def test_a_start_that_is_killed_while_it_removes_its_trial_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed there would otherwise find a damaged checkpoint alone, and refuse to start again."""
    remove = directory.remove_tree

    def kill_in_the_middle(path: Path) -> None:
        if "previous" not in path.name:
            (path / directory.SUMS).unlink()
            raise KeyboardInterrupt
        remove(path)

    folder = tmp_path / "checkpoints"
    monkeypatch.setattr(directory, "remove_tree", kill_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        directory.try_out(folder)
    monkeypatch.undo()
    assert newest(tmp_path) is None
    directory.finish_changes(folder)
    assert not [*folder.iterdir()]
