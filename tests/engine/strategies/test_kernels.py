"""What is faster and computes the same: garbage between steps, compiled losses, 8 bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import nn

from lightswitch.errors import Refused
from lightswitch.hooked_strategy import hooked, with_mixin
from lightswitch.strategies import callbacks as kernels
from lightswitch.strategies.callbacks import StrategyCallback, _ClipsAtOnce
from lightswitch.strategies.ddp import Single
from lightswitch.strategies.units import Compilation, Float8, is_compiled, is_fitting
from tests.engine.conftest import runs_in
from tests.engine.plain import PlainData, PlainModel
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS
from tests.runs import largest_difference


class Asks(pl.Callback):
    """Notes whether Python collects garbage at any moment, and how often which generation was collected."""

    def __init__(self) -> None:
        self.in_steps: list[bool] = []
        self.in_evaluation: list[bool] = []
        self.collected: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.in_steps.append(gc.isenabled())

    def on_validation_batch_start(self, *_: Any) -> None:
        self.in_evaluation.append(gc.isenabled())


def fitted(callbacks: list[pl.Callback], folder: Path, model: pl.LightningModule | None = None, **options: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", strategy=hooked(Single()), callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1, limit_val_batches=1,
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(model or PlainModel(), PlainData())


def test_garbage_is_collected_after_steps_and_at_no_other_moment_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.freeze()  # as launch/build does
    asks, own, frozen = Asks(), gc.collect, gc.get_freeze_count()
    monkeypatch.setattr(kernels, "_COLLECTS_OLDER", 2)
    monkeypatch.setattr(kernels, "_COLLECTS_ALL", 4)
    monkeypatch.setattr(gc, "collect", lambda generation=2: asks.collected.append(generation) or own(generation))
    between = [StrategyCallback(), asks]
    fitted(between, tmp_path, max_steps=4, accumulate_grad_batches=2, val_check_interval=4)
    assert asks.in_steps == [False] * 8
    assert asks.in_evaluation
    assert all(asks.in_evaluation)
    assert asks.collected[-4:] == [0, 1, 0, 2]
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen / 2, "imports stay frozen: to search them as the process ends takes a second"
    gc.unfreeze()


class Raises(PlainModel):
    def training_step(self, *_: Any) -> None:
        raise RuntimeError("this is the bug")


def test_garbage_is_collected_as_before_once_a_run_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="this is the bug"):
        fitted([StrategyCallback()], tmp_path, Raises(), max_steps=1)
    assert gc.isenabled()


DRAWN = torch.Generator().manual_seed(9)  # of two dtypes which, clipped together, differ from torch's in the last bit
GRADIENTS = {  # of parameters, by what distinguishes them
    "one kind": [torch.randn(3, 4), torch.randn(5), None, torch.tensor(2.0)],
    "16 bits": [torch.randn(30, 4).bfloat16(), torch.randn(7).bfloat16()],
    "two dtypes": [torch.randn(3, 4, generator=DRAWN), torch.randn(5, generator=DRAWN).double()],
    "sparse": [torch.randn(3, 4).to_sparse()],
    "complex": [torch.randn(3, dtype=torch.complex64)],
    "not finite": [torch.tensor([1.0, float("inf")]), torch.ones(2)],
    "none": [None],
}


@pytest.mark.parametrize("most", [0.1, 100])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_are_clipped_by_their_norm_as_torch_does_to_the_bit(kind: str, most: float) -> None:
    ours, torchs = (
        [nn.Parameter(torch.ones(1) if one is None else one.to_dense().clone()) for one in GRADIENTS[kind]]
        for _ in range(2)
    )
    for parameter, gradient in (*zip(ours, GRADIENTS[kind], strict=True), *zip(torchs, GRADIENTS[kind], strict=True)):
        parameter.grad = None if gradient is None else gradient.clone()
    clipped = _clipped(lambda: with_mixin(_ClipsAtOnce, Precision()).clip_grad_by_norm(torch.optim.SGD(ours), most))
    assert clipped == _clipped(lambda: torch.nn.utils.clip_grad_norm_(torchs, most))
    for own, its in zip(ours, torchs, strict=True):
        if own.grad is not None and kind != "sparse":
            assert torch.equal(own.grad.nan_to_num(5.0), its.grad.nan_to_num(5.0))  # type: ignore[union-attr]
            assert torch.equal(own.grad, own) == (most == 100 and kind != "not finite")


def _clipped(clip: Callable[[], object]) -> str:
    """What torch refuses, as sparse gradients, or nothing."""
    try:
        clip()
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return ""


class WithLoss(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
        self.criterion = nn.CrossEntropyLoss()


@pytest.mark.parametrize(("units", "is_taken"), [(None, True), (["Linear"], False)])
def test_a_models_losses_are_compiled_with_its_blocks(units: list[str] | None, is_taken: bool, tmp_path: Path) -> None:
    model = WithLoss()
    with torch.compiler.set_stance("force_eager"):
        fitted([StrategyCallback(compilation=Compilation(backend="eager", units=units))], tmp_path, model, max_steps=1)
    assert is_compiled(model.criterion) == is_taken


# 8 bits


def test_float8_is_refused_where_it_has_no_package_or_no_card(tmp_path: Path) -> None:
    found = "torchao, which is not installed" if find_spec("torchao") is None else "an NVIDIA GPU of compute"
    with pytest.raises(Refused, match=rf"callbacks.float8 needs {found}"):
        fitted([Float8()], tmp_path, max_steps=1)


def test_float8_takes_no_matrix_of_an_odd_size() -> None:
    assert is_fitting(nn.Linear(32, 48))
    assert not is_fitting(nn.Linear(32, 50257))
    assert not is_fitting(nn.Embedding(32, 48))


@pytest.mark.gpu
def test_a_model_trains_in_8_bits(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    run = (*LANGUAGE, *NO_CHECKPOINTS, "strategy=single", "trainer.accelerator=gpu", "precision=bf16-mixed")
    train = runs_in(tmp_path)
    eight = train(*run, "callbacks=[default,float8]", "compile=true")
    assert "linear layers in 8 bits" in eight.out
    assert largest_difference(eight, train(*run)) <= 0.1
