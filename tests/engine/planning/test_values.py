"""A step that asks tensors for values has a plan, which is that of the step without them, and says what was guessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.utils.rnn import pack_padded_sequence
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightswitch.errors import NeedsValues
from lightswitch.planning import scaling
from lightswitch.planning.estimate import Step
from lightswitch.planning.fakes import World
from lightswitch.planning.simulation import Work, simulate
from lightswitch.planning.timeline import Peak
from lightswitch.planning.tracking import Tracking
from lightswitch.strategies.callbacks import StrategyCallback
from lightswitch.strategies.ddp import Single
from lightswitch.strategies.fsdp import FSDP
from tests.engine.planning.modules import WaitsForAValue

SAMPLES = 64
Asks = Callable[["Asking", Tensor, Tensor, Tensor], object]  # of the module, its logits, their loss, the labels


class Asking(LightningModule):
    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.asks = asks
        self.body, self.head = nn.Linear(64, 256), nn.Linear(256, 10)
        self.accuracy, self.mean, self.losses = MulticlassAccuracy(10), MeanMetric(), CatMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.body(batch[0]).relu())
        loss = cross_entropy(logits, batch[1])
        found = self.asks(self, logits, loss, batch[1])
        return found if isinstance(found, Tensor) and found.requires_grad else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _batch(samples: int) -> list[Tensor]:
    return [torch.linspace(-1, 1, samples * 64).view(samples, 64), torch.arange(samples) % 10]


def _finite(module: Asking, logits: Tensor, loss: Tensor, labels: Tensor) -> None:
    assert torch.isfinite(loss)
    if torch.isnan(logits).any() or torch.isinf(logits).sum() > 0 or loss != loss or len(torch.isnan(logits).nonzero()):
        raise ValueError("not finite")


def _halved(module: Asking, logits: Tensor, loss: Tensor, labels: Tensor) -> None:
    left = loss.detach()
    while left.item() > 1e-3:
        left = left / 2


def _names(module: Asking, logits: Tensor, loss: Tensor, labels: Tensor) -> list[str]:
    names = list("abcdefghij")
    return [names[logits[0].argmax()], *(names[index] for index in logits.argmax(1).tolist())]


# What a step asks, and how many values of it are guessed: the labels are of the batch
STEPS: dict[str, tuple[Asks, int]] = {
    "nothing": (lambda m, logits, loss, labels: None, 0),
    "item": (lambda m, logits, loss, labels: loss / 2 if loss.item() > 3 else loss, 1),
    "float": (lambda m, logits, loss, labels: float(loss), 1),
    "text": (lambda m, logits, loss, labels: f"{loss:.3f}", 1),
    "condition": (lambda m, logits, loss, labels: loss if (logits > 0).any() else 2 * loss, 1),
    "tolist, and an index of a list": (_names, 2),
    "numpy": (lambda m, logits, loss, labels: logits.detach().cpu().numpy().mean(), 1),
    "finite": (_finite, 5),
    "a loop that ends by a value": (_halved, 102),
    "accuracy": (lambda m, logits, loss, labels: m.accuracy(logits, labels), 1),
    "mean": (lambda m, logits, loss, labels: m.mean(loss), 2),
    "list of a metric": (lambda m, logits, loss, labels: m.losses(loss), 2),
    "nonzero": (lambda m, logits, loss, labels: cross_entropy(logits[(labels >= 0).nonzero()[:, 0]], labels), 0),
    "mask of labels": (lambda m, logits, loss, labels: cross_entropy(logits[labels > 0], labels[labels > 0]), 0),
    "mask": (lambda m, logits, loss, labels: logits[logits > 0.7].sum(), 1),
    "masked_select": (lambda m, logits, loss, labels: logits.masked_select(logits < 0.1).sum(), 1),
    "unique": (lambda m, logits, loss, labels: logits.argmax(1).unique(return_counts=True), 1),
    "bincount": (lambda m, logits, loss, labels: torch.bincount(logits.argmax(1), minlength=10), 1),
    "one_hot": (lambda m, logits, loss, labels: one_hot(labels), 0),
    "repeat": (lambda m, logits, loss, labels: logits[:2].repeat_interleave(labels[:2], 0).sum(), 0),
    "longest": (lambda m, logits, loss, labels: logits[:, : labels.max()].sum(), 0),
    "packed": (
        lambda m, logits, loss, labels: pack_padded_sequence(logits, (1 + labels).cpu(), True, False).data.sum(), 0
    ),
    "equal": (lambda m, logits, loss, labels: torch.equal(logits.argmax(1), labels), 1),
    "random": (lambda m, logits, loss, labels: torch.rand(()) < 0.5 and loss, 1),
}  # fmt: skip


def _planned(asks: Asks, ranks: int = 1) -> Step:
    work = Work(lambda: Asking(asks), _batch, True, SAMPLES, 2, {"gradient_clip_val": 1.0})
    return simulate(work, Single() if ranks == 1 else FSDP(), World(1, ranks))


class _Batches:
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[Tensor]]:
        return (_batch(SAMPLES) for _ in range(6))


def _held(asks: Asks) -> Peak:
    """What a real step holds, the second of three."""
    tracking = Tracking()
    Trainer(
        accelerator="cpu", strategy=Single(), callbacks=[tracking, StrategyCallback()], max_steps=3, logger=False,
        accumulate_grad_batches=2, gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Asking(asks), _Batches())  # fmt: skip
    return tracking.step(1).timeline.peak()


@pytest.fixture(scope="module")
def nothing() -> Step:
    return _planned(STEPS["nothing"][0])


@pytest.mark.filterwarnings("ignore")  # what a Trainer without a run around it warns of
@pytest.mark.parametrize("name", STEPS)
def test_a_plan_is_that_of_the_step_without_its_questions(name: str, nothing: Step) -> None:
    asks, guesses = STEPS[name]
    step = _planned(asks)
    peak, without, real = step.growth.at(SAMPLES).peak(), nothing.growth.at(SAMPLES).peak(), _held(asks)
    assert sum(step.guessed.values()) == guesses
    assert all(place.partition(":")[0].endswith(Path(__file__).name) for place in step.guessed)
    assert peak.bytes == pytest.approx(without.bytes, rel=0.02)
    assert peak.bytes == pytest.approx(real.bytes, rel=0.01)
    assert peak.by_kind == pytest.approx(real.by_kind, abs=0.01 * real.bytes)
    assert step.growth.is_known


@pytest.mark.parametrize("name", ["item", "finite", "mask", "accuracy", "list of a metric"])
def test_traffic_is_that_of_the_step_without_its_questions(name: str) -> None:
    step, nothing = (_planned(STEPS[one][0], 4) for one in (name, "nothing"))
    assert step.last_collectives == nothing.last_collectives
    assert step.micro_flops == nothing.micro_flops


@pytest.mark.parametrize(
    ("asks", "told"),
    [
        (lambda m, logits, loss, labels: {}[float(loss)], "fails with guessed ones: KeyError: 0.5"),
        (lambda m, logits, loss, labels: torch.tensor([loss, loss]), r"reads tensor values in C\+\+ code"),
    ],
)
def test_what_guesses_do_not_lead_through_is_a_line(asks: Asks, told: str) -> None:
    with pytest.raises(NeedsValues, match=told):
        _planned(asks)


def test_a_place_is_found_beyond_code_that_torch_fx_generates() -> None:
    class Selecting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.masked_select(x > 0).sum()

    traced = torch.fx.symbolic_trace(Selecting())
    (place,) = _planned(lambda m, logits, loss, labels: traced(logits).sum()).guessed
    assert place.partition(":")[0].endswith(Path(__file__).name)


def test_a_simulation_leaves_the_methods_of_tensors_as_they_were() -> None:
    before = [getattr(FakeTensor, name) for name in ("numpy", "tolist", "__format__")]
    _planned(STEPS["text"][0])
    assert [getattr(FakeTensor, name) for name in ("numpy", "tolist", "__format__")] == before


def test_a_loop_that_does_not_end_is_told_with_its_place() -> None:
    with pytest.raises(NeedsValues, match=r"modules\.py:\d+ more than 1000 times"):
        simulate(Work(WaitsForAValue, _batch, True, 4, 1, {}), Single(), World(1, 1))


# How a run scales with its devices


def _estimate(nodes: int, seconds: float) -> dict[str, Any]:
    return {
        **{"nodes": nodes, "devices_per_node": 8, "replicas": 8 * nodes, "micro_batch": 2},
        **{"global_batch": 64, "accumulation": 4 // nodes, "bytes": 2**30, "usable_bytes": 2**31},
        **{"bound_by": "network", "least_seconds": {"network": seconds, "arithmetic": seconds / 2}},
        **{"bytes_within_node": 1e9, "bytes_between_nodes": 8e9},
    }


def _plan(folder: Path, name: str, nodes: int, seconds: float) -> Path:
    (folder / name).mkdir()
    file = folder / name / scaling.FILE
    file.write_text(json.dumps({"strategy": "fsdp", "estimate": _estimate(nodes, seconds)}))
    return file


def test_efficiency_is_of_a_device_against_the_least_world(tmp_path: Path) -> None:
    (line,) = scaling.read({_plan(tmp_path, "0", 2, 1.5): (), _plan(tmp_path, "1", 1, 2.0): ()})
    assert [(point.ranks, point.global_batch) for point in line.points] == [(8, 64), (16, 64)]
    assert line.efficiencies() == [1, pytest.approx(2.0 / (2 * 1.5))]  # 64 / 1.5 / 16 by 64 / 2 / 8
    assert line.points[0].received_bytes == 1e9 + 8e9 / 8  # what a node gets is shared by its devices
    rows = scaling.table(line).splitlines()
    assert rows[2].split() == ["16", "64", "2", "×", "2", "1", "yes", "1.5", "network", "2", "42.7", "67%"]


def test_jobs_that_differ_in_more_than_the_world_are_lines_of_their_own(tmp_path: Path) -> None:
    given = {
        _plan(tmp_path, f"{model}{nodes}", nodes, 2.0): [f"trainer.num_nodes={nodes}", f"model={model}", "seed=1"]
        for model in ("small", "large")
        for nodes in (1, 2)
    }
    lines = scaling.read(given)
    assert {line.strategy: len(line.points) for line in lines} == {"fsdp model=large": 2, "fsdp model=small": 2}
    assert [line.efficiencies() for line in lines] == [[1, 0.5], [1, 0.5]]
