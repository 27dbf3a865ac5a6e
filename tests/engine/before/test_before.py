"""Runs of an earlier commit (0ddfbcd, 2026-11-23), killed after step 20 of 30, go on under today's engine.

Made there by `train.py strategy=ddp` and `fsdp` over two devices, with `callbacks.last_checkpoint.every_n_steps=10` and
what `RUN` has; curve.csv is metrics.csv of the run that nothing disturbed.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engine.before.blobs import Classifier
from tests.night import at_night
from tests.runs import CHECKOUT, Train

RUN = (
    "trainer.accelerator=cpu",
    "model._target_=tests.engine.before.blobs.Classifier",
    "data._target_=tests.engine.before.blobs.Blobs",
    *("name=blobs", "global_batch_size=8", "micro_batch_size=2", "trainer.val_check_interval=10"),
    *("trainer.max_steps=30", "trainer.log_every_n_steps=1"),
    "trainer.gradient_clip_val=1",  # the default of any module, then
)
BEFORE = Path(__file__).parent


def _curve(name: str) -> dict[int, float]:
    with (BEFORE / "curve.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


@pytest.mark.parametrize(("made_by", "now"), [("fsdp", "ddp"), *at_night(("ddp", "fsdp"))])
def test_a_run_goes_on_as_if_nothing_had_changed(made_by: str, now: str, train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "before"
    shutil.copytree(BEFORE / "runs_of_0ddfbcd" / made_by, folder / "runs" / "blobs" / made_by, symlinks=True)
    run = train(*RUN, f"strategy={now}", f"run_id={made_by}", ranks=2, folder=folder)
    assert ", at step 20," in run.out
    for name in ("train/loss", "val/loss", "lr-AdamW"):
        assert run.column(name) == pytest.approx(_curve(name), abs=1e-5), name


@pytest.mark.nightly
def test_its_best_checkpoint_is_tested(train: Train, tmp_path: Path) -> None:
    shutil.copytree(BEFORE / "runs_of_0ddfbcd" / "fsdp", tmp_path / "old", symlinks=True)
    tested = train(*RUN[:5], "mode=test", f"ckpt_path={tmp_path}/old/checkpoints/best.ckpt")
    results = json.loads((tested.run_dir / "results.json").read_text())
    assert results["test/loss"] == pytest.approx(_curve("val/loss")[19], abs=1e-5)  # the same samples


@pytest.mark.nightly
def test_it_is_exported(tmp_path: Path) -> None:
    shutil.copytree(BEFORE / "runs_of_0ddfbcd" / "ddp", tmp_path / "old", symlinks=True)
    words = [sys.executable, "-m", "lightswitch.export", str(tmp_path / "old"), "-o", str(tmp_path / "exported")]
    done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    assert Classifier().load_state_dict(weights, strict=False).missing_keys == []
    assert weights["seen"] == 20  # micro batches of the 10 steps after which it was best
