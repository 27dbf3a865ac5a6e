"""Checkpoints that are made to mislead: each is refused in a line, and none takes more memory than it has bytes."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightswitch.checkpoints.last import position_of
from lightswitch.checkpoints.reader import Reader
from lightswitch.errors import UnfitCheckpoint
from lightswitch.export.__main__ import main
from tests.engine.checkpoints import hostile
from tests.engine.conftest import PLAIN, Train

WEIGHT = "model.net.0.weight"  # 16 × 2
RUN = (*PLAIN, "trainer.accelerator=cpu", "strategy=single", "run_id=mine", "trainer.max_steps=6")


def the_same_half_twice(found: Any) -> None:
    tensor = found.state_dict_metadata[WEIGHT]
    tensor.chunks = 2 * [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((8, 2)))]


def rows_over_columns(found: Any) -> None:
    tensor = found.state_dict_metadata[WEIGHT]
    tensor.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(size)) for size in ((8, 1), (8, 1), (16, 1))]


def quantized(found: Any) -> None:
    found.state_dict_metadata[WEIGHT].properties.dtype = torch.qint8


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (the_same_half_twice, f"has overlapping chunks of {WEIGHT}"),
        (rows_over_columns, f"has overlapping chunks of {WEIGHT}"),
        (quantized, f"has {WEIGHT} as torch.qint8, which lightswitch"),
    ],
)
def test_an_index_that_misleads_is_refused(edit: Callable[[Any], None], why: str, tmp_path: Path) -> None:
    path = hostile.edit_index(hostile.ours(tmp_path / "x.ckpt"), edit)
    with pytest.raises(UnfitCheckpoint, match=why):
        Reader(path, group=None)


def bomb(path: Path) -> Path:
    """The same archive with a tensor of 256 MB, in some hundred kilobytes."""
    torch.save({"state_dict": {"w": torch.zeros(64 << 20)}}, path)
    packed = path.with_name("packed")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small:
        for part in whole.infolist():
            small.writestr(part.filename, whole.read(part))
    packed.replace(path)
    return path


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    path = bomb(tmp_path / "x.ckpt")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UnfitCheckpoint, match=r"x\.ckpt claims 268\d{6} bytes, but has \d{6}"):
        Reader(path, group=None)


def test_nor_is_a_part_of_a_tensor(tmp_path: Path) -> None:
    path = hostile.ours(tmp_path / "x.ckpt")
    content = bomb(tmp_path / "bomb").read_bytes()
    (path / "__0_0.distcp").write_bytes(content)

    def point_to_it(found: Any) -> None:
        for info in found.storage_data.values():
            info.offset, info.length = 0, len(content)

    with pytest.raises(UnfitCheckpoint, match=r"__0_0\.distcp claims 268\d{6} bytes, but has"):
        Reader(hostile.edit_index(path, point_to_it), group=None).read(WEIGHT)


ODD: tuple[tuple[str, Any], ...] = (
    *(
        ("names_of_tied", {"a": []}),
        ("left_out", 5),
        ("left_out", [[]]),
        ("names_of_tied", ["a"]),
        ("hyper_parameters", ["a"]),
        ("loops", 5),
        ("callbacks", []),
        ("epoch", "x"),
    ),
    *(("global_step", -1), ("optimizer_states", {}), ("optimizer_states", [5]), ("lr_schedulers", [None])),
    *(("pytorch-lightning_version", "new"), ("extra_state", None), ("position", {"step": -1})),
    *(("position", {"step": 1 << 63}), ("position", {"more": 1}), ("view", torch.zeros(1).expand(1 << 40))),
)


@pytest.mark.parametrize(("key", "value"), ODD, ids=lambda value: value if isinstance(value, str) else None)
def test_a_state_of_another_type_is_no_state_of_a_run(key: str, value: Any, tmp_path: Path) -> None:
    path = hostile.ours(tmp_path / "x.ckpt")
    state = torch.load(path / "trainer.pt", weights_only=True)
    torch.save({**state, key: value}, path / "trainer.pt")
    with pytest.raises(UnfitCheckpoint, match=r"^\S*x\.ckpt can't be read as a checkpoint: [^\n]*$"):
        position_of(hostile.sign(path))


def test_what_libraries_stumble_over_in_a_state_is_told_in_a_line(tmp_path: Path, train: Train) -> None:
    good = train(*RUN, "trainer.max_steps=3")
    path = good.run_dir / "checkpoints" / "step_3.ckpt"
    state = torch.load(path / "trainer.pt", weights_only=True)
    for key, value in {"optimizer_states": [{}], "loops": {"fit_loop": {}}}.items():
        torch.save({**state, key: value}, path / "trainer.pt")
        hostile.sign(path)
        refused = train(*RUN, f"resume={path}", folder=good.folder, check=False)
        assert refused.returncode == 2, f"{key}: {refused.err}"
        (line,) = refused.err.splitlines()
        assert line.startswith("error: runs/plainmodel/mine/checkpoints/step_3.ckpt"), line


def test_safetensors_refuse_a_dtype_that_they_do_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("model:\n  _target_: tests.engine.plain.PlainModel\n")
    torch.save({"state_dict": {"w": torch.zeros(3, dtype=torch.complex128)}}, tmp_path / "x.ckpt")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "x.ckpt"), "-o", str(tmp_path / "out.safetensors")])
    assert capsys.readouterr().err == "error: safetensors can't store torch.complex128; use -o NAME.pt\n"


@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json", "model-1.safetensors"])
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    path = tmp_path if name.startswith("model") else tmp_path / name
    with pytest.raises(UnfitCheckpoint, match=f"{name} is a pipe, expected a regular file"):
        Reader(path, group=None)


def test_good_safetensors_are_read(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3.0)}, tmp_path / "x.safetensors")
    found: Tensor = Reader(tmp_path / "x.safetensors", group=None).read("model.w")
    assert found.tolist() == [0, 1, 2]


def test_a_config_beside_weights_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    from lightswitch.export.models import read_config

    os.mkfifo(tmp_path / "x.yaml")
    with pytest.raises(UnfitCheckpoint, match="is a pipe, expected a regular file"):
        read_config(tmp_path / "x.yaml")
