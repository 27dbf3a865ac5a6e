"""What an offload to disk needs of a machine is refused in a line; tests/nightly/test_disk.py trains with one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from lightswitch.errors import Refused
from lightswitch.regular_files import MARK

pytest.importorskip("deepspeed")
from lightswitch.deepspeed import state as disk  # imports deepspeed


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


def test_a_drive_without_room_is_refused_at_the_start(tmp_path: Path) -> None:
    block = {"device": "nvme", "nvme_path": str(tmp_path)}
    with torch.device("meta"):
        large = nn.Linear(1 << 25, 1 << 20)
    with pytest.raises(Refused, match=r"nvme_path=\S+: each rank writes 3.93e\+05 GiB, and \S+ GiB are free"):
        disk.fit_buffers({"offload_optimizer": block}, large, ranks=1, copies=3)


def test_buffers_hold_the_largest_shard_and_a_limit_of_locked_memory_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    zero = {"offload_param": {"device": "nvme", "buffer_count": 5, "nvme_path": str(tmp_path)}, "sub_group_size": 1000}
    disk.fit_buffers(zero, nn.Linear(100, 99), ranks=2, copies=3)
    assert zero["offload_param"]["buffer_size"] == 4950  # 100 × 99 / 2
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 10, 1 << 10))
    monkeypatch.setattr(disk, "_may_lock_memory", lambda: False)
    with pytest.raises(Refused, match=r"each process locks \d+ MiB of memory to offload to disk, but may lock 0 MiB"):
        disk.fit_buffers(zero, nn.Linear(1000, 1000), ranks=1, copies=3)
