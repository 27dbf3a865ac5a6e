"""A run can start from what Lightning's own strategies have written."""

from __future__ import annotations

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
WRITTEN = ("fsdp1 × 2", "deepspeed_stage_3 × 2", *at_night("single", "fsdp × 2", "deepspeed_stage_2 × 2"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("fresh"))(*RUN, "strategy=single", *AS_LIGHTNING)


@pytest.mark.parametrize("way", WRITTEN)
def test_a_run_starts_from_its_weights(way: str, fresh: Finished, train: Train) -> None:
    written = train(*RUN, *WAYS[way].switches, *AS_LIGHTNING, ranks=WAYS[way].ranks)
    path = written.run_dir / "lightnings.ckpt"
    tested = train(*RUN, "mode=test", f"ckpt_path={path}", "strategy=single")
    assert tested.column("test/loss")[0] == pytest.approx(written.column("test/loss")[4], abs=1e-5)
    if way.startswith(("fsdp1", "deepspeed_stage_3")):
        begun = train(*RUN, f"init_from={path}", "strategy=fsdp", "run_id=new", "trainer.max_steps=1", ranks=2)
        assert begun.column("train/loss")[0] < fresh.column("train/loss")[0] - 0.01


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "odd.ckpt")
    (tmp_path / "empty").mkdir()
    for name in ("odd.ckpt", "empty"):
        with pytest.raises(UnfitCheckpoint, match=rf"{name} can't be read as a checkpoint: [^\n]*$"):
            Reader(tmp_path / name, group=None)


def test_it_is_not_resumed(fresh: Finished, train: Train) -> None:
    path = fresh.run_dir / "lightnings.ckpt"
    refused = train(*RUN, f"resume={path}", "run_id=new", check=False)
    assert f"{path} can't be resumed: it names no position in the data" in refused.err
    assert f"init_from={path}" in refused.err
    assert refused.returncode == 2
