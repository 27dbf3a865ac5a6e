"""A loss that is not finite ends a run before it spoils a checkpoint."""

from __future__ import annotations

import json

import torch
from torch import nn

from lightswitch.failures.stopping import _not_finite
from tests.engine.conftest import PLAIN, Train

NAN = ("model._target_=tests.engine.plain.NanModel", "model.step=7", PLAIN[1], "logger=csv", "run_id=mine")
RUN = (*NAN, "~callbacks.lr_monitor", "global_batch_size=40", "trainer.max_steps=12", "trainer.log_every_n_steps=1")
RUN = (*RUN, "trainer.val_check_interval=4", "callbacks.last_checkpoint.every_n_steps=3")
ADVICE = (
    "resume from the last checkpoint with a lower learning rate, or with on_nan=ignore, under which precision=16-mixed "
    "skips such a step\n"
)
RECORD = ("callbacks.record._target_=tests.engine.plain.Record", "callbacks.record.folder=.")


def test_a_run_stops_with_step_and_samples_and_goes_on_from_what_was_good(train: Train) -> None:
    run = train(*RUN, *RECORD, check=False)
    assert run.returncode == 2
    taken = json.loads((run.folder / "samples_0.jsonl").read_text().splitlines()[7])["ids"]
    told = f"in train, epoch 1, step 7, micro batch 0: samples {', '.join(map(str, taken[:8]))} and 32 more"
    assert run.err == f"error: the loss is nan {told}; the weights are finite; {ADVICE}"
    kept = sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())
    assert kept == ["best.ckpt", "last.ckpt", "step_3.ckpt", "step_6.ckpt"]
    resumed = train(*RUN, "model.step=99", folder=run.folder)
    assert "at step 6" in resumed.out
    assert resumed.column("val/loss")[11] < 2


def test_the_rank_whose_loss_it_is_tells_it(train: Train) -> None:
    run = train(*RUN, "model.rank=1", "strategy=ddp", ranks=2, check=False)
    (line,) = {line for line in run.err.splitlines() if line.startswith("error: ")}
    assert line.startswith("error: the loss is nan in train, epoch 1, step 7, micro batch 0: samples ")


def test_no_checkpoint_is_saved_of_weights_that_a_gradient_has_spoilt(train: Train) -> None:
    run = train(*RUN, "model.where=gradient", "callbacks.last_checkpoint.every_n_steps=2", check=False)
    assert run.returncode == 2
    told = "net.0.weight is not finite, so no checkpoint is saved, in train, epoch 1, step 8"
    assert run.err.startswith(f"error: {told}")
    assert max(path.name for path in (run.run_dir / "checkpoints").glob("step_*")) == "step_6.ckpt"


def test_a_run_that_ignores_it_trains_on(train: Train) -> None:
    run = train(*RUN, "on_nan=ignore")
    assert [step for step, loss in run.column("train/loss").items() if loss != loss] == [7, 8, 9, 10, 11]


def test_the_lowest_finite_value_is_finite() -> None:
    """As a mask has it, whose squares overflow."""
    module = nn.Module()
    module.mask = nn.Parameter(torch.full((4,), torch.finfo(torch.float32).min), requires_grad=False)
    module.scale = nn.Parameter(torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16))
    assert _not_finite(module) is None
    for value in (torch.nan, torch.inf, -torch.inf):
        module.mask.data[1] = value
        assert _not_finite(module) == "mask"
