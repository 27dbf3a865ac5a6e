"""No way in runs what a checkpoint names: each is refused in a line."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lightswitch
from lightswitch.checkpoints.reading import Reader
from lightswitch.errors import UnfitCheckpoint
from lightswitch.export.__main__ import main
from tests.engine.checkpoints import hostile
from tests.engine.conftest import PLAIN, Train
from tests.night import at_night

Build = Callable[[Path, Path], Path]

RUN = (*PLAIN, "trainer.accelerator=cpu", "strategy=single", "run_id=mine", "trainer.max_steps=6")
ELSEWHERE = (
    "trainer.strategy._target_=lightning.pytorch.strategies.SingleDeviceStrategy",
    "+trainer.strategy.device=cpu",
)
CONFIG = "model:\n  _target_: tests.engine.plain.PlainModel\n"
WHY = "would run code"


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What a payload makes."""
    return tmp_path / "the payload ran"


@pytest.mark.parametrize("build", [*hostile.DIRECTORIES, *hostile.FILES])
def test_the_checkpoints_of_these_tests_do_run_code_elsewhere(build: Build, tmp_path: Path, ran: Path) -> None:
    """Or the tests below could not fail."""
    path = build(tmp_path / "x.ckpt", ran)
    payload = pickle.dumps(hostile.Payload(ran))[2:-1]
    assert any(str(ran).encode() in file.read_bytes() for file in [path, *path.rglob("*")] if file.is_file())
    pickle.loads(b"\x80\x04" + payload + b".")
    assert ran.exists()


RESUME, INIT_FROM, TEST = ("resume={path}",), ("init_from={path}",), ("mode=test", "ckpt_path={path}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("build", "switches"),
    [
        *((hostile.index, RESUME), (hostile.index, INIT_FROM), (hostile.index, TEST), (hostile.state, INIT_FROM)),
        *((hostile.index, (*TEST, *ELSEWHERE)), (hostile.file, (*TEST, *ELSEWHERE))),
        *at_night((hostile.file, INIT_FROM), (hostile.file_of_old, INIT_FROM)),
    ],
)
def test_train_reads_it_as_data(
    build: Build, switches: tuple[str, ...], tmp_path: Path, ran: Path, train: Train
) -> None:
    path = build(tmp_path / "x.ckpt", ran)
    refused = train(*RUN, *(switch.format(path=path) for switch in switches), check=False)
    assert not ran.exists()
    assert refused.err == f"error: {refused.refusal}\n"
    assert refused.refusal.startswith(f"{path} can't be read as a checkpoint: ")
    assert WHY in refused.refusal


def test_a_strategy_from_elsewhere_is_given_no_directory(tmp_path: Path, train: Train) -> None:
    path = hostile.ours(tmp_path / "x.ckpt")
    refused = train(*RUN, "mode=test", f"ckpt_path={path}", *ELSEWHERE, check=False)
    told = "is a directory, which SingleDeviceStrategy can't read without running code; use strategy=ddp"
    assert refused.refusal == f"{path} {told}"


@pytest.mark.nightly
def test_a_run_started_again_passes_it_over(tmp_path: Path, ran: Path, train: Train) -> None:
    checkpoints = tmp_path / "runs" / "plainmodel" / "mine" / "checkpoints"
    hostile.index(checkpoints / "step_4.ckpt", ran)
    alone = train(*RUN, folder=tmp_path, check=False)
    assert not ran.exists()
    damage = "runs/plainmodel/mine/checkpoints/step_4.ckpt can't be read as a checkpoint: .metadata"
    assert alone.refusal.startswith(damage)
    assert alone.refusal.endswith("start over with resume=never, or resume another one with resume=PATH")
    hostile.state(checkpoints / "step_5.ckpt", ran)
    first = train(*RUN, "resume=never", "trainer.max_steps=3", folder=tmp_path)
    for path in (first.run_dir / "checkpoints_1").iterdir():
        shutil.copytree(path, checkpoints / path.name)
    again = train(*RUN, "trainer.max_steps=4", folder=tmp_path)
    assert not ran.exists()
    assert "step_5.ckpt can't be read as a checkpoint: trainer.pt names posix.mkdir, which would run code" in again.out
    assert "resumes    runs/plainmodel/mine/checkpoints/step_3.ckpt, at step 3" in again.out


def read_all(path: Path) -> dict[str, torch.Tensor]:
    return Reader(path, group=None).read_weights()


@pytest.mark.parametrize("read", [read_all, partial(lightswitch.load, trust=True)], ids=["weights", "load"])
@pytest.mark.parametrize("build", [*hostile.DIRECTORIES, *hostile.FILES])
def test_reading_weights_runs_none(build: Build, read: Callable[[Path], Any], tmp_path: Path, ran: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    path = build(tmp_path / "x.ckpt", ran)
    why = r"is damaged, or was not written by torch\.save" if build is hostile.pickled else "which would run code"
    with pytest.raises(UnfitCheckpoint, match=rf"x\.ckpt can't be read as a checkpoint: .*{why}$"):
        read(path)
    assert not ran.exists()


@pytest.mark.parametrize("build", [hostile.index, hostile.file])
@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_an_export_runs_none(
    build: Build, name: str, tmp_path: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    path = build(tmp_path / "x.ckpt", ran)
    with pytest.raises(SystemExit):
        main([str(path), "-o", str(tmp_path / name)])
    assert not ran.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} can't be read as a checkpoint: " in line
    assert WHY in line


def test_a_class_that_an_index_may_name_stays_as_it_is(tmp_path: Path) -> None:
    """Pickle can set attributes of what it names, of a class for all who use it."""
    path = Path(shutil.copytree(hostile.BEFORE, tmp_path / "x.ckpt"))
    metadata = torch.distributed.checkpoint.metadata.Metadata
    setting = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(S'seen'\nI1\ndtb."
    (path / ".metadata").write_bytes(setting)
    with pytest.raises(UnfitCheckpoint, match=r"\.metadata is not an index of tensors"):
        Reader(hostile.sign(path), group=None)
    assert not hasattr(metadata, "seen")


def test_safetensors_refuse_a_dtype_that_they_do_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("model:\n  _target_: tests.engine.plain.PlainModel\n")
    torch.save({"state_dict": {"w": torch.zeros(3, dtype=torch.complex128)}}, tmp_path / "x.ckpt")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "x.ckpt"), "-o", str(tmp_path / "out.safetensors")])
    assert capsys.readouterr().err == "error: safetensors can't store torch.complex128; use -o NAME.pt\n"


@pytest.mark.parametrize("build", hostile.FILES)
def test_load_of_a_state_dict_runs_none(build: Build, tmp_path: Path, ran: Path) -> None:
    with pytest.raises(UnfitCheckpoint, match=r"x\.pt can't be read as a checkpoint: "):
        lightswitch.load(build(tmp_path / "x.pt", ran), trust=True)
    assert not ran.exists()
