"""What a module or its data draw at random, or count in fractions, is the same at any world size and over a resume."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Subset, random_split

from lightswitch.batches.seeds import mix, seed_generators
from tests.engine.conftest import PLAIN, PLAIN_DATA, Finished, Train, runs_in
from tests.engine.plain import PlainData, PlainModel, Points
from tests.night import at_night
from tests.runs import largest_difference, predictions

HERE = "tests.engine.batches.test_drawn"
RUN = ("trainer.accelerator=cpu", "run_id=mine", "global_batch_size=12", "trainer.log_every_n_steps=1")


class SplitData(PlainData):
    """Splits its samples at random, in each process and stage anew, as most people do; also in its constructor, and by
    a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)
        self.order = np.random.permutation(70)

    def setup(self, stage: str) -> None:
        drawn = self.order[torch.randperm(70, generator=self.generator)]
        self.training, self.held_out = random_split(Subset(Points(70, noise=0.3), drawn.tolist()), [50, 20])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class DrawnData(PlainData):
    """Draws the samples of each epoch, and once those of all validations, where it makes the loaders."""

    held_out: list[int] | None = None

    def train_dataloader(self) -> DataLoader:
        chosen = np.random.permutation(300)[torch.randperm(48)]
        return DataLoader(Subset(Points(300), chosen.tolist()), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        if self.held_out is None:
            self.held_out = np.random.permutation(300)[:37].tolist()
        return DataLoader(Subset(Points(300, 1), self.held_out), self.batch_size)


class DrawingModel(PlainModel):
    """Draws in its hooks: to augment a batch on its device, to begin an epoch, and to evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.shift.fill_(torch.rand(()))

    def on_train_epoch_end(self) -> None:
        self.log("train/drawn", torch.rand(()))

    def on_validation_start(self) -> None:
        self.drawn = torch.rand(())

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"val/drawn": self.drawn, "val/drawn_at_end": torch.rand(())})

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y, index = batch
        return (x + self.shift + torch.randn_like(x), y, index) if self.trainer.training else batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0] + torch.randn_like(batch[0]), *batch[1:]), batch_idx)


class NamingModel(PlainModel):
    """Predicts which samples it is given."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[2]


SPLIT = (f"model._target_={HERE}.NamingModel", f"data._target_={HERE}.SplitData", *RUN, "trainer.max_epochs=2")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("split"))(*SPLIT, "seed=1")


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), *at_night(("fsdp", 3))])
def test_a_split_that_is_drawn_in_setup_is_one(strategy: str, ranks: int, split: Finished, train: Train) -> None:
    """Else a resume on more devices would train on what has been held out."""
    run = train(*SPLIT, "seed=1", f"strategy={strategy}", ranks=ranks)
    for name in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(run, split, name) <= 1e-5, name


def test_a_split_is_one_in_each_stage_whatever_its_seed_and_model(split: Finished, train: Train) -> None:
    last = split.run_dir / "checkpoints/last.ckpt"
    tested = train(*SPLIT, "mode=test", f"ckpt_path={last}", "model.width=16", "run_id=another")
    validated = train(*SPLIT, "mode=validate", f"ckpt_path={last}", "run_id=third")
    (loss,) = set(tested.column("test/loss").values())
    assert {round(value, 5) for value in validated.column("val/loss").values()} == {round(loss, 5)}
    assert round(loss, 5) == round(split.column("val/loss")[max(split.column("val/loss"))], 5)
    assert {round(value, 5) for value in split.column("test/loss").values()} == {round(loss, 5)}  # the last is the best


def test_a_split_is_a_function_of_the_runs_seed_in_plain_python_too(split: Finished, train: Train) -> None:
    last = split.run_dir / "checkpoints/last.ckpt"
    run = train(*SPLIT, "mode=predict", f"ckpt_path={last}", "seed=2", "run_id=another")
    assert "seed       1, of the checkpoint's run, which splits data as it did; seed=2 has no effect" in run.out
    seed_everything(1)
    data = SplitData()
    seed_everything(1)
    data.setup("fit")
    assert predictions(run).tolist() == [index for _, _, index in data.held_out]


def test_a_checkpoint_from_before_keeps_its_split(split: Finished, train: Train, tmp_path: Path) -> None:
    """A hash of the seed split what setup draws, and a constructor drew from where the module's had left off."""
    older = tmp_path / "older.ckpt"
    shutil.copytree(split.run_dir / "checkpoints/last.ckpt", older)
    state = torch.load(older / "trainer.pt", weights_only=True)
    del state["position"]["splits_by_seed"]
    torch.save(state, older / "trainer.pt")
    kept = [line for line in (older / "SHA256SUMS").read_text().splitlines() if "trainer.pt" not in line]
    digest = hashlib.sha256((older / "trainer.pt").read_bytes()).hexdigest()
    (older / "SHA256SUMS").write_text("\n".join([*kept, f"{digest}  trainer.pt"]) + "\n")
    run = train(*SPLIT, "mode=predict", f"ckpt_path={older}", "seed=1")
    seed_everything(1)
    NamingModel()
    data = SplitData()
    seed_generators(mix(1))
    data.setup("fit")
    assert predictions(run).tolist() == [index for _, _, index in data.held_out]


DRAWN = (f"model._target_={HERE}.DrawingModel", PLAIN_DATA, *RUN, "data.samples=60", "trainer.max_steps=13")
DRAWN = (*DRAWN, "trainer.val_check_interval=4", "callbacks.last_checkpoint.every_n_steps=1")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("drawn"))(*DRAWN, "callbacks.last_checkpoint.keep=20")


@pytest.mark.parametrize(  # at an epoch's end, and where a validation is due; in the middle of an epoch
    ("step", "workers"), [(8, 2), *at_night((5, 0), (7, 0))]
)
def test_what_hooks_draw_follows_the_position(step: int, workers: int, drawn: Finished, train: Train) -> None:
    resumed = train(*DRAWN, f"data.workers={workers}", f"resume={drawn.run_dir}/checkpoints/step_{step}.ckpt")
    for name in ("train/loss", "train/drawn", "val/loss", "val/drawn", "val/drawn_at_end"):
        found, expected = resumed.column(name), drawn.column(name)
        assert found == {at: expected[at] for at in found}, name
        assert found.keys() >= {at for at in expected if at >= step}


@pytest.mark.nightly
def test_what_the_methods_of_loaders_draw_follows_the_position(train: Train) -> None:
    run = (*PLAIN[:1], f"data._target_={HERE}.DrawnData", *RUN, "+trainer.reload_dataloaders_every_n_epochs=1")
    run = (*run, "trainer.max_epochs=4", "trainer.val_check_interval=1.0", "trainer.check_val_every_n_epoch=1")
    alone = train(*run, "callbacks.last_checkpoint.every_n_steps=6", "callbacks.last_checkpoint.keep=9")
    resumed = train(*run, f"resume={alone.run_dir}/checkpoints/step_6.ckpt", "run_id=resumed")
    two = train(*run, ranks=2)
    assert "different samples" not in resumed.out
    for name in ("train/loss", "val/loss"):
        expected = alone.column(name)
        assert resumed.column(name) == {step: value for step, value in expected.items() if step >= 6}, name
        assert two.column(name) == pytest.approx(expected, abs=1e-5), name
