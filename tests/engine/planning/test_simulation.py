"""A step that is simulated on one device takes what a real one takes, at any micro-batch, whatever values it reads."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import pack_padded_sequence
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightswitch.errors import Unplanned
from lightswitch.planning.device import World
from lightswitch.planning.estimate import STATES, Growth, Holding, holding
from lightswitch.planning.repeats import repetitions
from lightswitch.planning.simulation import Simulation, Work, simulate
from lightswitch.strategies.ddp import Single
from tests.engine.foreign import WaitsForAValue
from tests.engine.models.language import LanguageModel
from tests.engine.models.transformer import MLP

NOTHING = Holding(dict.fromkeys(STATES, 0.0))
WORK = Work(
    lambda: LanguageModel(partial(torch.optim.AdamW, lr=1e-3)),
    lambda count: 2 * (torch.zeros(count, 32, dtype=torch.long),),
    is_cut=True,
    samples=2,
    options={},
)


def _growth(step: Simulation) -> Growth:
    nothing = [[0.0] * step.units] * 3
    return Growth(step, replace(NOTHING, gathered=nothing, communication=nothing), 1)


def test_any_micro_batch_follows_from_two() -> None:
    found, expected = (_growth(simulate(replace(WORK, samples=samples))) for samples in (2, 11))
    assert found.peak(11).bytes == pytest.approx(expected.peak(11).bytes, rel=0.001)


class InChunks(LanguageModel):
    """Its path goes by the size of the micro batch, as that of a loss in chunks."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([super(InChunks, self).forward(rows) for rows in ids.split(2)])


def test_of_a_module_that_goes_by_its_size_other_micro_batches_are_estimated() -> None:
    """Not exactly, as the peak may move; what is proposed is simulated at its own size."""
    work = replace(WORK, model=lambda: InChunks(partial(torch.optim.AdamW, lr=1e-3)))
    found, expected = (_growth(simulate(replace(work, samples=samples))) for samples in (4, 16))
    assert found.is_known
    assert found.peak(16).bytes == pytest.approx(expected.peak(16).bytes, rel=0.1)


def test_parameters_gradients_and_state_are_those_of_the_optimizer() -> None:
    """33,952 parameters in 32 bits, with Adam's two moments; frozen ones have none."""

    class Frozen(LanguageModel):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            self.table = nn.Parameter(torch.zeros(1000, 100), requires_grad=False)

    step = simulate(replace(WORK, model=lambda: Frozen(partial(torch.optim.AdamW, lr=1e-3))))
    assert sum(one.numel for one in step.weights) == 33_952 + 100_000
    assert holding(step, Single(), World(1, 1), True, "32-true").states["gradients"] == 4 * 33_952
    assert sum(one.state_bytes for one in step.weights) == 8 * 33_952


class Gan(LightningModule):
    """Two parts, each with a forward pass after the other's step; the second takes the most memory."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parts = nn.ModuleList([nn.Linear(64, 8), nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for part, optimizer in zip(self.parts, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(part(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adamax(part.parameters(), foreach=False) for part in self.parts]


def test_a_forward_pass_after_an_optimizers_step_grows_with_the_samples() -> None:
    work = Work(Gan, lambda count: torch.ones(count, 64), True, 64, {})
    found, expected = (_growth(simulate(replace(work, samples=samples))).peak(512) for samples in (64, 512))
    assert found.bytes == expected.bytes
    assert found.by_kind["activations"] == expected.by_kind["activations"] > 4 * 512 * 512  # of tanh, in 32 bits


def test_units_that_recompute_store_no_activations() -> None:
    plain, recomputing = (
        _growth(simulate(replace(WORK, samples=64, recomputes=one))).peak(64) for one in (False, True)
    )
    assert recomputing.by_kind["activations"] < 0.6 * plain.by_kind["activations"]


def _is_that_of_each_block(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulate(work)
    monkeypatch.setattr("lightswitch.planning.simulation.repetitions", lambda units: [])
    expected = simulate(work)
    assert found.weights == expected.weights
    assert found.flops == expected.flops
    for trace, other in zip(found.traces, expected.traces, strict=True):
        assert trace.places == other.places
        assert list(trace.units) == list(other.units)
        assert {kind: list(held) for kind, held in trace.held.items()} == {
            kind: list(held) for kind, held in other.held.items()
        }


def _runs_of(kind: type[nn.Module], work: Work) -> int:
    runs = Counter[type[nn.Module]]()
    counting = register_module_forward_pre_hook(lambda module, given: runs.update([type(module)]))
    try:
        simulate(work)
    finally:
        counting.remove()
    return runs[kind]


@pytest.mark.parametrize(("precision", "recomputes"), [("32-true", False), ("bf16-mixed", True), ("bf16-true", False)])
def test_blocks_that_repeat_are_simulated_once(
    precision: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = partial(LanguageModel, partial(torch.optim.AdamW, lr=1e-3), layers=6)
    work = replace(WORK, model=model, options={"precision": precision}, recomputes=recomputes)
    assert _runs_of(MLP, work) == 2 * 3 * (1 + recomputes)  # two steps of the first two blocks and the last
    _is_that_of_each_block(work, monkeypatch)


class Residual(nn.Module):
    """It does not store what it is given, so its caller frees that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        return x + self.layer(x * 2).tanh()


class Keeping(Residual):
    """It keeps a product that the step reads after all blocks."""

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x * 2)
        return super().forward(x, kept)


class Memory(list[Tensor]):
    """Of a class that a list of arguments does not show the tensors of."""


class Stack(LanguageModel):
    def __init__(self, kind: type[Residual]) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=1e-3))
        self.tokens, self.blocks = nn.Embedding(256, 32), nn.ModuleList(kind() for _ in range(6))

    def configure_model(self) -> None:
        """Do nothing: the layers are made."""

    def forward(self, ids: Tensor) -> Tensor:
        kept = Memory()
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, kept)
        return linear(sum(kept, x), self.tokens.weight)


def test_what_the_caller_of_a_block_frees_is_freed_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(WORK, model=partial(Stack, Residual))
    assert _runs_of(Residual, work) == 2 * 6
    assert _runs_of(nn.Linear, work) == 2 * 3
    _is_that_of_each_block(work, monkeypatch)


def test_blocks_that_keep_what_they_compute_are_simulated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(WORK, model=partial(Stack, Keeping))
    assert _runs_of(nn.Linear, work) == 2 * (3 + 6)  # once as if they repeated
    _is_that_of_each_block(work, monkeypatch)


def test_units_repeat_if_they_differ_in_nothing_but_values() -> None:
    def blocks(*drops: float) -> dict[str, nn.Module]:
        return {str(n): nn.Sequential(nn.Linear(4, 4), nn.Dropout(one)) for n, one in enumerate(drops)}

    assert [[*kind] for kind in repetitions(blocks(0, 0, 0.5, 0, 0.5, 0))] == [["0", "1", "3", "5"]]
    assert not repetitions(blocks(0, 0.1, 0.2, 0.3, 0.4))
    for owner in (own := blocks(0, 0, 0, 0)).values():
        owner.part = nn.Identity()
        owner.part.owners = [owner, own]  # type: ignore[assignment]
    assert len(*repetitions(own)) == 4
    for unit in own.values():
        unit.table = np.arange(4)  # type: ignore[assignment]
    assert not repetitions(own)
    frozen = blocks(0, 0, 0, 0)
    frozen["0"].requires_grad_(False)
    assert not repetitions(frozen)


def test_a_simulation_leaves_the_process_as_it_was() -> None:
    before = sys.excepthook, rank_zero_only.rank, Tensor.numpy  # type: ignore[attr-defined]  # Lightning's
    simulate(WORK)
    assert (sys.excepthook, rank_zero_only.rank, Tensor.numpy) == before  # type: ignore[attr-defined]


# A step that reads values has the plan of the step without them, and says what was replaced

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
    if torch.isnan(logits).any() or torch.isinf(logits).sum() > 0 or len(torch.isnan(logits).nonzero()):
        raise ValueError("not finite")


def _names(module: Asking, logits: Tensor, loss: Tensor, labels: Tensor) -> list[str]:
    names = list("abcdefghij")
    return [names[logits[0].argmax()], *(names[index] for index in logits.argmax(1).tolist())]


# What a step asks, and how many values of it are replaced: the labels are of the batch
STEPS: dict[str, tuple[Asks, int]] = {
    "nothing": (lambda m, logits, loss, labels: None, 0),
    "item": (lambda m, logits, loss, labels: loss / 2 if loss.item() > 3 else loss, 1),
    "float": (lambda m, logits, loss, labels: float(loss), 1),
    "text": (lambda m, logits, loss, labels: f"{loss:.3f}", 1),
    "condition": (lambda m, logits, loss, labels: loss if (logits > 0).any() else 2 * loss, 1),
    "tolist, and an index of a list": (_names, 1 + SAMPLES),
    "numpy": (lambda m, logits, loss, labels: logits.detach().cpu().numpy().mean(), 1),
    "finite": (_finite, 1),
    "nonzero": (lambda m, logits, loss, labels: cross_entropy(logits[(labels >= 0).nonzero()[:, 0]], labels), 0),
    "mask of labels": (lambda m, logits, loss, labels: cross_entropy(logits[labels > 0], labels[labels > 0]), 0),
    "mask": (lambda m, logits, loss, labels: logits[logits > 0.7].sum(), 1),
    "masked_select": (lambda m, logits, loss, labels: logits.masked_select(logits < 0.1).sum(), 1),
    "unique": (lambda m, logits, loss, labels: logits.argmax(1).unique(return_counts=True), 1),
    "one_hot": (lambda m, logits, loss, labels: one_hot(labels), 0),
    "repeat": (lambda m, logits, loss, labels: logits[:2].repeat_interleave(labels[:2], 0).sum(), 0),
    "longest": (lambda m, logits, loss, labels: logits[:, : labels.max()].sum(), 0),
    "packed": (
        lambda m, logits, loss, labels: pack_padded_sequence(logits, (1 + labels).cpu(), True, False).data.sum(), 0
    ),
    "equal": (lambda m, logits, loss, labels: torch.equal(logits.argmax(1), labels), 1),
}  # fmt: skip


def _planned(asks: Asks) -> Simulation:
    return simulate(Work(lambda: Asking(asks), _batch, True, SAMPLES, {}))


def test_a_plan_is_that_of_the_step_without_its_questions() -> None:
    nothing = _growth(_planned(STEPS["nothing"][0])).peak(SAMPLES)
    for name, (asks, count) in STEPS.items():
        step = _planned(asks)
        assert sum(step.replaced.values()) == count, name
        assert all(place.partition(":")[0].endswith(Path(__file__).name) for place in step.replaced), name
        assert _growth(step).peak(SAMPLES).bytes == pytest.approx(nothing.bytes, rel=0.02), name


def test_metrics_that_look_at_values_have_a_plan() -> None:
    for asks in (
        lambda m, logits, loss, labels: m.accuracy(logits, labels),
        lambda m, logits, loss, labels: m.mean(loss),
        lambda m, logits, loss, labels: m.losses(loss),
    ):
        assert _growth(_planned(asks)).is_known


@pytest.mark.parametrize(
    ("asks", "told"),
    [
        (lambda m, logits, loss, labels: {}[float(loss)], "fails with replaced ones: KeyError: 1.0"),
        (lambda m, logits, loss, labels: torch.tensor([loss, loss]), "tensor values"),
    ],
)
def test_what_replaced_values_do_not_lead_through_is_a_line(asks: Asks, told: str) -> None:
    with pytest.raises(Unplanned, match=told):
        _planned(asks)


def test_a_place_is_found_beyond_code_that_torch_fx_generates() -> None:
    class Selecting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.masked_select(x > 0).sum()

    traced = torch.fx.symbolic_trace(Selecting())
    (place,) = _planned(lambda m, logits, loss, labels: traced(logits).sum()).replaced
    assert place.partition(":")[0].endswith(Path(__file__).name)


def test_a_loop_that_does_not_end_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightswitch.planning.ledger._MOST_READS", 500)
    with pytest.raises(Unplanned, match=r"foreign\.py:\d+ more than 500 times"):
        simulate(Work(WaitsForAValue, _batch_of_pictures, True, 4, {}))


def _batch_of_pictures(samples: int) -> list[Tensor]:
    return [torch.linspace(0, 1, samples * 64).view(samples, 1, 8, 8), torch.zeros(samples, dtype=torch.long)]
