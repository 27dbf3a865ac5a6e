"""`self.all_gather` where ranks hold different counts of rows: a batch is cut so that no sample is read twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightswitch.hooked_strategy import filled
from tests.engine.conftest import PLAIN_DATA, Train
from tests.engine.plain import PlainModel
from tests.engine.tiny import NO_CHECKPOINTS
from tests.night import at_night

RUN = (PLAIN_DATA, *NO_CHECKPOINTS, "trainer.accelerator=cpu", "trainer.num_sanity_val_steps=0", "global_batch_size=24")
TOLD = (
    "self.all_gather: ranks have from 18 to 19 rows; shorter tensors are padded by repeating their last row, as "
    "Lightning's sampler repeats samples\n"
)


class Gathering(PlainModel):
    """Gathers what an epoch's validation has seen; in training, features for a contrastive loss, 8 samples a step."""

    def on_validation_epoch_start(self) -> None:
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        features = nn.functional.normalize(self.net(batch[0]), dim=-1)
        gathered = self.all_gather(features, sync_grads=True).flatten(0, 1)
        self.log("train/rows", float(len(gathered)))
        return torch.logsumexp(gathered @ gathered.T, 1).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(batch[2])

    def on_validation_epoch_end(self) -> None:
        own = torch.cat(self.seen)
        gathered = self.all_gather({"ids": own, "rank": self.global_rank})
        if self.trainer.is_global_zero:
            ids = gathered["ids"]
            print("gathered", *ids.shape, len(set(ids.flatten().tolist())), gathered["rank"].sum())


class GatheringOthers(PlainModel):
    """Gathers shapes that can't be one tensor's."""

    def on_train_start(self) -> None:
        self.all_gather(torch.zeros(3, 2 + self.global_rank))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", *at_night("fsdp", "deepspeed_stage_2")])
def test_shorter_shares_are_filled_with_their_last_row(strategy: str, train: Train) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    model = "model._target_=tests.engine.strategies.test_gathering.Gathering"
    steps = ("data.samples=61", "trainer.max_steps=3", "trainer.val_check_interval=1", "trainer.log_every_n_steps=1")
    run = train(model, *RUN, *steps, f"strategy={strategy}", ranks=2)
    assert run.out.count("gathered 2 19 37 tensor(1") == 3  # 37 samples, each of them there, at each validation
    assert run.out.count(TOLD) == 1
    assert run.column("train/rows") == {0: 24, 1: 24, 2: 14}  # 13 samples are left of 61 for the last step


@pytest.mark.nightly
def test_other_shapes_are_refused_in_a_line(train: Train) -> None:
    model = "model._target_=tests.engine.strategies.test_gathering.GatheringOthers"
    run = train(model, *RUN, "trainer.max_steps=1", "strategy=ddp", ranks=2, check=False)
    assert (run.returncode, run.err) == (
        2,
        "error: self.all_gather: rank 0 has a tensor of shape (3, 2), rank 1 one of (3, 3); shapes may differ only in "
        "the first dimension, the samples\n",
    )


def test_the_last_row_has_the_gradient_of_its_copies() -> None:
    rows = torch.ones(2, 3, requires_grad=True)
    filled(rows, [(len(rows), *rows.shape[1:]), (4, *rows.shape[1:])]).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1, 1, 1], [3, 3, 3]]


def test_a_rank_without_a_row_has_zeros_that_are_in_its_graph() -> None:
    rows = filled(torch.ones(0, 3, requires_grad=True), [(0, 3), (2, 3)])
    assert rows.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert rows.requires_grad
