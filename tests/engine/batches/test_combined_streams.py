"""Streams beside other training loaders, in one process: what each step reads, whatever the accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused
from tests.engine.batches.streams import SizedStream, Stream
from tests.engine.fits import local_trainer

WHOLE, CUT = BatchPlan(8, 8, 1, 1), BatchPlan(8, 2, 1, 4)


class Reading(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.read: dict[tuple[int, int], dict[str, list[int]]] = {}

    def training_step(self, batch: dict[str, Tensor | None], batch_idx: int) -> Tensor:
        step = self.read.setdefault((self.current_epoch, self.global_step), {})
        for name, part in batch.items():
            step.setdefault(name, []).extend([] if part is None else part.tolist())
        return self.layer.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _read(plan: BatchPlan, mode: str, folder: Path, **sets: Any) -> dict[tuple[int, int], dict[str, list[int]]]:
    model = Reading()
    loaders = {name: DataLoader(data, 3, drop_last=True) for name, data in sets.items()}
    _trainer(plan, folder).fit(model, CombinedLoader(loaders, mode))
    return model.read


def _trainer(plan: BatchPlan, folder: Path) -> pl.Trainer:
    batch = GlobalBatch(plan, seed=0)
    return local_trainer(folder, batch, max_epochs=2, accumulate_grad_batches=plan.accumulation)


class StatefulLoader(DataLoader):
    """Keeps a state, as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("the engine keeps the position")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the engine sets the position")


SETS = {"a": range(40), "b": Stream(range(27))}  # five steps, and three
LENGTHS = {"min_size": [8, 8, 8], "max_size": [8, 8, 8, 0, 0], "max_size_cycle": [8, 8, 8, 8, 8]}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", LENGTHS)
def test_a_stream_beside_a_longer_loader_reads_the_same_at_any_accumulation(mode: str, tmp_path: Path) -> None:
    sets = SETS if mode != "max_size_cycle" else SETS | {"b": SizedStream(range(27))}
    whole, cut = (_read(plan, mode, tmp_path, **sets) for plan in (WHOLE, CUT))
    assert whole == cut
    epochs = [[step["b"] for (of, _), step in whole.items() if of == epoch] for epoch in range(2)]
    assert [[len(ids) for ids in epoch] for epoch in epochs] == [LENGTHS[mode]] * 2
    assert [*range(8)] == epochs[0][0] == epochs[1][0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_of_several_loaders_in_a_cycle_a_stream_must_have_a_length(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no len\(\), so it is unknown which loader ends last"):
        _read(WHOLE, "max_size_cycle", tmp_path, **SETS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dataset", [range(40), Stream(range(40))])
def test_a_loader_that_keeps_a_state_is_not_asked_for_it(dataset: Any, tmp_path: Path) -> None:
    trainer = _trainer(WHOLE, tmp_path)
    trainer.fit(Reading(), CombinedLoader({"a": StatefulLoader(dataset, 4)}, "min_size"))
    assert "combined_loader" not in trainer.fit_loop.state_dict()["state_dict"]
