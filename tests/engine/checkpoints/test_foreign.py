"""A run can start from what Lightning's own strategies have written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightswitch.checkpoints.reader import Reader
from lightswitch.errors import UnfitCheckpoint
from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import WAYS
from tests.night import at_night

RUN = (*LANGUAGE, "run_id=mine", "trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.limit_val_batches=1")
AS_LIGHTNING = (
    "callbacks.lightnings._target_=tests.engine.checkpoints.lightnings.AsLightning",
    "callbacks.lightnings.folder=${hydra:runtime.output_dir}",
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("fresh"))(*RUN, "strategy=single", *AS_LIGHTNING)


def test_a_run_starts_from_its_weights(fresh: Finished, train: Train) -> None:
    path = fresh.run_dir / "lightnings.ckpt"
    tested = train(*RUN, "mode=test", f"ckpt_path={path}", "strategy=single")
    assert tested.column("test/loss")[0] == pytest.approx(fresh.column("test/loss")[4], abs=1e-5)
    begun = train(*RUN, f"init_from={path}", "strategy=fsdp", "run_id=new", "trainer.max_steps=1", ranks=2)
    assert begun.column("train/loss")[0] < fresh.column("train/loss")[0] - 0.01


@pytest.mark.parametrize("way", ["fsdp × 2", "deepspeed_stage_3 × 2", *at_night("deepspeed_stage_2 × 2")])
def test_a_sharded_directory_is_refused_with_what_converts_it(way: str, train: Train) -> None:
    written = train(*RUN, *WAYS[way].switches, *AS_LIGHTNING, ranks=WAYS[way].ranks)
    path = written.run_dir / "lightnings.ckpt"
    refused = train(*RUN, "mode=test", f"ckpt_path={path}", "strategy=single", check=False)
    assert refused.returncode == 2
    (line,) = refused.err.splitlines()
    typed = re.search(r"; type (python .*), and use (.*)$", line)
    assert typed is not None, line
    words = shlex.split(typed[1])
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True, timeout=1000)
    tested = train(*RUN, "mode=test", f"ckpt_path={path.parent / typed[2]}", "strategy=single")
    assert tested.column("test/loss")[0] == pytest.approx(written.column("test/loss")[4], abs=1e-5)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "odd.ckpt")
    (tmp_path / "empty").mkdir()
    for name in ("odd.ckpt", "empty"):
        with pytest.raises(UnfitCheckpoint, match=rf"{name} can't be read as a checkpoint: [^\n]*$"):
            Reader(tmp_path / name, group=None)


def test_a_module_named_as_a_wrapper_keeps_its_name(tmp_path: Path) -> None:
    torch.save({"state_dict": {"module.weight": torch.zeros(3)}}, tmp_path / "file.ckpt")
    names = {
        live: Reader(tmp_path / "file.ckpt", None, live=[live]).names("model.") for live in ("weight", "module.weight")
    }
    assert names == {live: {live} for live in names}


def test_it_is_not_resumed(fresh: Finished, train: Train) -> None:
    path = fresh.run_dir / "lightnings.ckpt"
    refused = train(*RUN, f"resume={path}", "run_id=new", check=False)
    assert f"{path} can't be resumed: it contains no position in the data" in refused.err
    assert f"init_from={path}" in refused.err
    assert refused.returncode == 2
