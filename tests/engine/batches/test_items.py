"""A loss that is a mean over tokens which are not padding: the mean over all of a step, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightswitch.errors import Refused
from tests.engine.fits import Fit, Fits
from tests.night import at_night
from tests.pool import RankFailed

PADDING = -100


class Texts(Dataset):
    """Texts of 1 to 12 tokens, filled up to 12."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 16, (count, 12), generator=draw)
        self.lengths = torch.randint(1, 12, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = self.ids[index]
        return ids, torch.where(torch.arange(12) < self.lengths[index], (ids * 7 + 3) % 16, PADDING)


class Padded(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Texts(100), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Texts(11), batch_size=8)

    test_dataloader = val_dataloader


class Tagger(pl.LightningModule):
    """Returns what its loss is a mean over, unless it is told not to."""

    def __init__(self, items: Callable[[Tensor], Any] | None = torch.Tensor.sum) -> None:
        super().__init__()
        self.items = items
        self.net = nn.Sequential(nn.Embedding(16, 12), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        ids, targets = batch
        loss = F.cross_entropy(self.net(ids).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        return loss if self.items is None else {"loss": loss, "items": self.items(targets != PADDING)}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None: ...

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


WHOLE = Fit(Tagger, Padded, global_batch=24, micro_batch=None, steps=6, arguments="gradient_clip_val=0.5")


STRATEGIES = ("single", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
CUTS = [("ddp", None), *((strategy, 3) for strategy in ("single", "ddp", "fsdp"))]
OTHERS = [(strategy, micro) for strategy in STRATEGIES for micro in (None, 4, 3) if (strategy, micro) not in CUTS]


@pytest.mark.parametrize(("strategy", "micro_batch"), [*CUTS, *at_night(*OTHERS)])
def test_a_mean_over_items_is_that_of_one_batch_of_one_process(
    strategy: str, micro_batch: int | None, fits: Fits
) -> None:
    whole = fits(WHOLE)[0]
    cut = replace(WHOLE, strategy=strategy, micro_batch=micro_batch)
    outcomes = fits(cut, 1 if strategy == "single" else 2)
    assert outcomes[0].column("train/loss") == pytest.approx(whole.column("train/loss"), rel=1e-5)
    for name, tensor in whole.end.items():
        torch.testing.assert_close(outcomes[0].end[name], tensor, rtol=1e-4, atol=1e-6)


def none(kept: Tensor) -> int:
    return 0


def each(kept: Tensor) -> Tensor:
    return kept


def word(kept: Tensor) -> str:
    return "many"


@pytest.mark.parametrize(
    ("items", "told"), [(none, "0"), (each, "a tensor of shape (24, 12)"), (word, "'many'")]
)  # fmt: skip
def test_what_is_no_number_of_items_is_refused(items: Callable[[Tensor], Any], told: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(WHOLE, module=partial(Tagger, items)))
    assert isinstance(failed.value.error, Refused)
    told = f'training_step has returned {told} as "items"; return the number of items that its loss is a mean over, '
    assert str(failed.value.error) == f"{told}above 0"


class Changing(Tagger):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if self.global_step == 0 else output["loss"]


def test_items_of_some_steps_alone_are_refused(fits: Fits) -> None:
    with pytest.raises(RankFailed, match='has returned "items" in some batches and not in others; return it in each'):
        fits(replace(WHOLE, module=Changing, micro_batch=4))


class ByHand(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_a_step_by_hand_weights_its_losses_itself(fits: Fits) -> None:
    with pytest.raises(
        RankFailed, match="training_step uses manual optimization, and weights its losses itself; leave"
    ):
        fits(replace(WHOLE, module=ByHand, arguments="gradient_clip_val=null"))
