"""State that is no parameter goes on over a resume and into an export, wherever a module or a callback keeps it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torchmetrics import SumMetric

import lightswitch
from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints.finetuning import TrainableOnly, follow_strategy
from lightswitch.checkpoints.last import LastCheckpoints, StepBoundary
from lightswitch.checkpoints.reading import Reader
from lightswitch.errors import Refused
from lightswitch.loop.loops import replace_loops
from lightswitch.strategies.callbacks import StrategyCallback
from tests.engine.conftest import PLAIN_DATA, Finished, Train, once
from tests.engine.fits import local_trainer
from tests.engine.plain import PlainModel
from tests.night import at_night
from tests.runs import largest_difference


class CountingPart(nn.Module):
    count = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


class CountingModel(PlainModel):
    """Counts in extra state, a metric, a checkpoint's hooks, and a buffer, by which it trains.

    ``state_dict`` has copies of the first two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.part, self.samples = torch.zeros(1), CountingPart(), SumMetric()
        self.last: deque[int] = deque(maxlen=3)
        self.samples.persistent(True)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.steps = torch.cat([self.steps, self.steps[-1:] + 1])
        self.part.count += 2
        self.last.append(self.part.count)
        self.samples.update(float(len(batch[0])))
        self.seen += 1
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.seen)

    def on_train_batch_end(self, *_: object) -> None:
        self.log_dict({**self._counts(), "last": float(sum(self.last))})

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.log_dict(self._counts())

    def _counts(self) -> dict[str, Any]:
        counts = {"steps": self.steps[-1], "part": float(self.part.count), "samples": self.samples.compute()}
        return {f"count/{name}": value for name, value in counts.items()} | {"count/seen": self.seen.float()}

    def get_extra_state(self) -> Tensor | None:
        return self.steps if len(self.steps) > 1 else None

    def set_extra_state(self, state: Tensor) -> None:
        self.steps = state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["last"] = {"deque": self.last, "frozenset": frozenset(self.last)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert set(checkpoint["last"]["frozenset"]) == set(checkpoint["last"]["deque"])
        self.last.extend(checkpoint["last"]["deque"])


class Averages(pl.Callback):
    """Averages of the weights as many write them: copies in a dict, and one of them in a list and in a deque."""

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


MODEL = f"model._target_={__name__}.CountingModel"
RUN = (
    *(MODEL, PLAIN_DATA, "global_batch_size=8", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu"),
    *("trainer.max_steps=6", "callbacks.last_checkpoint.every_n_steps=3", "run_id=mine"),
    *(f"callbacks.mine._target_={__name__}.Averages", "callbacks.mine.folder=${hydra:runtime.output_dir}"),
)
COUNTS = {"count/steps": 6, "count/part": 12, "count/samples": 48, "count/seen": 6}

whole = once(*RUN, "strategy=single")


@pytest.mark.parametrize(
    ("begun", "ended"),
    [
        *(("single", "fsdp"), ("fsdp", "fsdp")),
        *at_night(("ddp", "single"), ("fsdp", "single"), ("fsdp", "ddp")),
        *at_night(("single", "deepspeed_stage_2"), ("deepspeed_stage_2", "ddp")),
    ],
)
def test_it_goes_on_under_any_strategy(begun: str, ended: str, whole: Finished, train: Train) -> None:
    stopped = train(*RUN, f"strategy={begun}", "trainer.max_steps=3", ranks=0 if begun == "single" else 2)
    resumed = train(*RUN, f"strategy={ended}", ranks=0 if ended == "single" else 2, folder=stopped.folder)
    for name in (*COUNTS, "last"):
        assert resumed.column(name) == whole.column(name), name
    assert largest_difference(resumed, whole) <= 1e-5
    found, expected = (torch.load(run.run_dir / "averages.pt") for run in (resumed, whole))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("checkpoint", "strategy", "ranks"),
    [
        ("checkpoints/last.ckpt", "ddp", 2),
        *at_night(("checkpoints/last.ckpt", "deepspeed_stage_2", 2), ("checkpoints/last.ckpt", "single", 0)),
    ],
)
def test_an_evaluation_has_it(checkpoint: str, strategy: str, ranks: int, whole: Finished, train: Train) -> None:
    test = ("mode=test", f"ckpt_path={whole.run_dir}/{checkpoint}", f"strategy={strategy}", "run_id=tested")
    tested = train(*RUN, *test, ranks=ranks)
    assert {name: set(tested.column(name).values()) for name in COUNTS} == {name: {COUNTS[name]} for name in COUNTS}


@pytest.mark.parametrize("name", [".", "checkpoints/last.ckpt"])
def test_a_loaded_model_has_it(name: str, whole: Finished) -> None:
    assert int(lightswitch.load(whole.run_dir / name).seen) == 6


# Layers that a hook, a step or a callback freezes and unfreezes, through a resume


class ChangesOnce(pl.LightningModule):
    """Unfreezes its backbone in the second step, and freezes its head in the step ``last_of_head``."""

    def __init__(self, last_of_head: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last_of_head = last_of_head
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.backbone.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.backbone.requires_grad_(True)
        if self.global_step == self.last_of_head:
            self.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch)).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 4), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_was_unfrozen_once_is_trained_after_a_resume(tmp_path: Path) -> None:
    expected = _fitted(ChangesOnce(), tmp_path, steps=4)
    resumed = _fitted(ChangesOnce(), tmp_path, steps=4, resumed=tmp_path / "step_2.ckpt")
    assert torch.equal(resumed.backbone.weight, expected.backbone.weight)


def test_a_resumed_run_may_freeze_what_the_run_before_trained(tmp_path: Path) -> None:
    before = _fitted(ChangesOnce(), tmp_path, steps=2)
    module = ChangesOnce()
    module.head.requires_grad_(False)
    resumed = _fitted(module, tmp_path, steps=4, resumed=tmp_path / "step_2.ckpt")
    assert torch.equal(resumed.head.weight, before.head.weight)
    assert not torch.equal(resumed.backbone.weight, before.backbone.weight)


def test_a_loss_of_nothing_that_is_trained_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"^the loss of step 2 depends on no trainable parameter: .*"):
        _fitted(ChangesOnce(last_of_head=2), tmp_path, steps=4)


def _fitted(
    module: ChangesOnce,
    folder: Path,
    steps: int,
    resumed: Path | None = None,
    callbacks: list[pl.Callback] | None = None,
) -> ChangesOnce:
    engine = [StrategyCallback(), GlobalBatch(BatchPlan.derive(1, 1, 1), seed=3), StepBoundary()]
    saves = LastCheckpoints(str(folder), every_n_steps=2)
    trainer = local_trainer(folder, *engine, *(callbacks or ()), saves, max_steps=steps)
    replace_loops(trainer)
    trainer.fit(module, ckpt_path=resumed)
    return module


class FrozenAfterwards(ChangesOnce):
    """Trains its head in the first step alone, another layer in each, and its backbone in none."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.requires_grad_(self.global_step == 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.more(self.head(self.backbone(batch))).square().mean()


def test_what_was_trained_and_is_frozen_since_is_saved_also_by_a_resumed_run(tmp_path: Path) -> None:
    trained = _fitted(FrozenAfterwards(), tmp_path, 2, callbacks=[TrainableOnly()])
    saved = tmp_path / "step_2.ckpt"
    resumed = _fitted(FrozenAfterwards(), tmp_path, 4, resumed=saved, callbacks=[TrainableOnly()])
    for path in (saved, tmp_path / "step_4.ckpt"):
        assert {name.split(".")[0] for name in Reader(path, None).names("model.")} == {"head", "more"}
    assert torch.equal(resumed.head.weight, trained.head.weight)


# What Lightning's BaseFinetuning adds to an optimizer. Runs with it: strategies/test_module_shapes.py, Unfreezing


def test_a_layer_that_begins_as_another_is_unfrozen_and_none_is_added_twice() -> None:
    head, backbone = nn.LayerNorm(2), nn.LayerNorm(2)
    optimizer = SGD(head.parameters(), lr=0.1)
    callback = BackboneFinetuning()
    follow_strategy([callback])
    for _ in range(2):
        callback.unfreeze_and_add_param_group([head, backbone], optimizer)
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, layer.parameters())) for layer in (head, backbone)
    ]
