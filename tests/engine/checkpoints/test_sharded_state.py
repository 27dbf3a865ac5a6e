"""Copies of weights that a callback keeps by itself go on over a resume, shards or not."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.engine.conftest import PLAIN_DATA, Finished, Train, runs_in
from tests.night import at_night

RUN = (
    *("model._target_=tests.engine.plain.PlainModel", PLAIN_DATA, "trainer.accelerator=cpu"),
    *("global_batch_size=24", "trainer.max_steps=6", "run_id=mine", "callbacks.last_checkpoint.every_n_steps=2"),
    *(
        "callbacks.last_checkpoint.keep=9",
        "callbacks.mine._target_=tests.engine.checkpoints.test_sharded_state.Averages",
    ),
    "callbacks.mine.folder=${hydra:runtime.output_dir}",
)


class Averages(pl.Callback):
    """An average of weights as many write it: copies in a dict, and one of them in a list and in a deque."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.kept: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.kept:
            by_name = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}
            first = next(iter(by_name.values()))
            self.kept = {"by_name": by_name, "list": [first.clone()], "deque": deque([first.clone()], 2)}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, weight in pl_module.named_parameters():
            self.kept["by_name"][name].lerp_(weight, 0.3)
        for one in (*self.kept["list"], *self.kept["deque"]):
            one.lerp_(next(pl_module.parameters()), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        every = [*self.kept["by_name"].values(), *self.kept["list"], *self.kept["deque"]]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in every]
        if trainer.is_global_zero:
            torch.save(whole, f"{self.folder}/averages.pt")


def _averages(run: Finished) -> list[torch.Tensor]:
    return list(torch.load(Path(run.run_dir) / "averages.pt"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("whole"))(*RUN, "strategy=single")


@pytest.mark.parametrize(
    ("begun", "ended"), [("fsdp", "fsdp"), ("fsdp", "single"), *at_night(("ddp", "ddp"), ("fsdp", "ddp"))]
)
def test_they_go_on(begun: str, ended: str, whole: Finished, train: Train) -> None:
    stopped = train(*RUN, f"strategy={begun}", "trainer.max_steps=2", ranks=2)
    resumed = train(*RUN, f"strategy={ended}", ranks=0 if ended == "single" else 2, folder=stopped.folder)
    for found, expected in zip(_averages(resumed), _averages(whole), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
