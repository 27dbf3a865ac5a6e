"""What an offload to disk needs of a machine is refused in a line; tests/nightly/test_disk.py trains with one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from torch import nn

from lightswitch.errors import Refused
from lightswitch.regular_files import MARK

pytest.importorskip("deepspeed")
from lightswitch.deepspeed import disk  # imports deepspeed

NVME = {"device": "nvme", "buffer_count": 5}


def test_a_disk_without_room_is_refused_when_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"nvme_path: \S+x.swp of 1.07e\+09 GiB: .+; free some space, or use a folder on"):
        disk.reserve(tmp_path / "x.swp", 1 << 60)
    assert not (tmp_path / "x.swp").exists()
    disk.reserve(tmp_path / "x.swp", 1 << 20)
    assert (tmp_path / "x.swp").stat().st_blocks * 512 >= 1 << 20


def test_runs_that_share_a_drive_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = {disk.folder_of(tmp_path, Path(f"runs/{name}/mine")) for name in ("one", "other")}
    assert len(folders) == 2
    for folder in folders:
        (folder / "zero_stage_3" / "optimizer" / "rank0").mkdir(parents=True)
        disk._remove(folder, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_of_a_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = disk.folder_of(tmp_path, Path("runs/one/mine"))
    disk.open_folder(folder, rank=0, is_first_of_node=True)
    (folder / "zero_stage_3" / "optimizer" / "rank7").mkdir(parents=True)
    disk.open_folder(folder, rank=0, is_first_of_node=True)
    assert [path.name for path in folder.iterdir()] == [MARK]


def test_buffers_hold_the_largest_shard_and_a_limit_of_locked_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = {"offload_param": dict(NVME), "sub_group_size": 1000}
    disk.fit_buffers(zero, nn.Linear(100, 99), ranks=2)
    assert zero["offload_param"]["buffer_size"] == 4950  # 100 × 99 / 2
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 10, 1 << 10))
    monkeypatch.setattr(disk, "_may_lock_memory", lambda: False)
    with pytest.raises(Refused, match=r"each process locks \d+ MiB of memory to offload to disk, but may lock 0 MiB"):
        disk.fit_buffers(zero, nn.Linear(1000, 1000), ranks=1)
