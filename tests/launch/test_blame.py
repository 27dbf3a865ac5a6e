"""What the user can mend is told in a line, also in the midst of a run; a bug keeps its traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import PLAIN, Finished, Train

RUN = (*PLAIN, "trainer.accelerator=cpu", "run_id=mine", "trainer.max_steps=1", "trainer.val_check_interval=1")
BUGGY = """
from tests.plain import PlainModel

class Bug(PlainModel):
    def training_step(self, batch, batch_idx):
        return int("three")
"""


def _is_a_line(refused: Finished, line: str) -> None:
    assert refused.err.splitlines()[-1] == f"error: {line}"
    assert "Traceback" not in refused.err
    assert refused.returncode == 2


@pytest.mark.parametrize("strategy", ["single", "ddp_fork"])
def test_a_batch_that_the_model_does_not_take_is_told_in_a_line(strategy: str, train: Train) -> None:
    refused = train("model=gpt", "data=digits", f"strategy={strategy}", "trainer.accelerator=cpu", check=False)
    found = "found a batch of torch.float32 of shape (60, 1, 8, 8); expected token ids (batch, time)"
    _is_a_line(refused, f"model: {found}, as data=python_source, text and tokens have them")
    assert "in validation_step" in (refused.run_dir / "train.log").read_text()  # the traceback


def test_a_window_longer_than_the_context_is_told_in_a_line(train: Train) -> None:
    refused = train("data.context=128", "trainer.accelerator=cpu", check=False)
    _is_a_line(
        refused,
        "model: found a window of 128 tokens, but the model's context is 64; set data.context=64 or model.context=128",
    )


def test_a_bug_in_a_step_keeps_its_traceback(train: Train, tmp_path: Path) -> None:
    (tmp_path / "buggy.py").write_text(BUGGY)
    failed = train(*RUN, "model._target_=buggy.Bug", folder=tmp_path, check=False)
    assert failed.returncode == 1
    assert "Traceback (most recent call last)" in failed.err
    assert 'return int("three")' in failed.err


@pytest.mark.parametrize("reads", ["mode=test ckpt_path={}", "trainer.max_steps=2"])
def test_a_checkpoint_of_another_model_is_told_in_a_line(reads: str, train: Train) -> None:
    first = train(*RUN)
    path = first.run_dir / "checkpoints" / "last.ckpt"
    refused = train(*RUN, "model.width=8", *reads.format(path).split(), folder=first.folder, check=False)
    assert refused.returncode == 2
    assert len(refused.err.splitlines()) == 1
    assert "net.0.weight has 16×2 in it and 8×2 in the model" in refused.err


def test_a_file_that_is_no_checkpoint_is_told_in_a_line(train: Train, tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "some.pt")
    refused = train(*RUN, "mode=test", f"ckpt_path={tmp_path}/some.pt", check=False)
    assert refused.returncode == 2
    assert len(refused.err.splitlines()) == 1
    assert "can't be read as a checkpoint: it has no state_dict" in refused.err
