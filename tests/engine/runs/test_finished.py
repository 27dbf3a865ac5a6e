"""A run that has ended, and what tells so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightswitch.runs import finished
from tests.engine.conftest import PLAIN, Train

RUN = (
    *PLAIN,
    "run_id=mine",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "logger=csv",
    "~callbacks.lr_monitor",
)
UNFIT = [
    b'{"step": 1, "limits": {}, "go_on": null}',
    b'{"step": 1, "limits": {"max_steps": "abc", "max_epochs": null, "max_time": null}, "go_on": null}',
    b'{"step": "1", "limits": {"max_steps": 2, "max_epochs": null, "max_time": null}, "go_on": null}',
    b"[" * 100_000,
]


CFG = OmegaConf.create(
    {"mode": "fit", "resume": "auto", "trainer": {"max_steps": 2, "max_epochs": None, "max_time": None}}
)


@pytest.mark.parametrize("content", [b"", b'{"step": 2, "lim', b"\xff\xfe\x00", b"[]", *UNFIT])
def test_a_harmed_note_of_the_end_is_passed_over(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run: Any = SimpleNamespace(run_dir=tmp_path, is_first=True)
    finished.keep(CFG, tmp_path, 2, None)
    assert finished.before(CFG, run)
    (tmp_path / "ended.json").write_bytes(content)
    assert not finished.before(CFG, run)
    assert caplog.text.count("ended.json can't be read; the run uses its checkpoints instead\n") == 1


def test_a_directory_in_its_place_is_passed_over_and_kept(train: Train) -> None:
    first = train(*RUN)
    first_test = first.column("test/loss")
    (first.run_dir / "ended.json").unlink()
    (first.run_dir / "ended.json").mkdir()
    again = train(*RUN, folder=first.folder)
    assert "resumes    runs/plainmodel/mine/checkpoints/step_2.ckpt, at step 2\n" in again.out
    assert again.column("test/loss") == first_test
    assert again.out.count("can't be read; the run uses its checkpoints instead\n") == 1
    assert (again.err, (first.run_dir / "ended_1.json").is_dir()) == ("", True)
    assert "finished   fit and test have ended at step 2;" in train(*RUN, folder=first.folder).out
