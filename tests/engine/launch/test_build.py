"""A run's strategy has the engine's hooks, whoever wrote its class and however the config names it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf import OmegaConf
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.launch.build import _of_other_kinds, _strategy
from lightswitch.launch.instantiation import plugins, refused_optimizers
from lightswitch.strategies.ddp import DDP, Single
from lightswitch.strategies.fsdp import FSDP
from tests.engine.conftest import PLAIN_DATA, Train
from tests.engine.curves import largest_difference
from tests.engine.fits import Fit, trained
from tests.engine.modules import walk
from tests.engine.plain import PlainData, PlainModel, SGDModel
from tests.engine.tiny import NO_CHECKPOINTS
from tests.night import at_night
from tests.pool import Pool, RankFailed

_BY_FUNCTION = {"_target_": "lightswitch.strategies.ddp.auto", "accelerator": "cpu", "devices": 2, "num_nodes": 1}


def _named(strategy: dict[str, Any]) -> HookedStrategy:
    return _strategy(OmegaConf.create({"accelerator": "cpu", "devices": 1, "num_nodes": 1, **strategy}))


def test_a_module_of_the_other_lightning_is_refused_with_the_import_to_write() -> None:
    made = type("Mine", (), {"__module__": "pytorch_lightning.core"})()
    cfg = OmegaConf.create({"model": {"_target_": "mine.Mine"}, "mode": "fit"})
    (refused,) = _of_other_kinds(made, None, cfg)
    assert str(refused) == (
        "model._target_=mine.Mine: found a Mine, expected lightning.pytorch's LightningModule, not "
        "pytorch_lightning's; in the file that defines it, write import lightning.pytorch as pl for import "
        "pytorch_lightning as pl"
    )


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ({}, Single),
        ({"strategy": "ddp"}, DDPStrategy),
        ({"strategy": {"_target_": "lightswitch.strategies.ddp.DDP", "bucket_cap_mb": 3}}, DDP),
        ({"strategy": _BY_FUNCTION}, DDP),
    ],
)
def test_a_strategy_is_named_by_its_code_by_lightnings_name_or_not_at_all(
    strategy: dict[str, Any], kind: type[Strategy]
) -> None:
    made = _named(strategy)
    assert isinstance(made, HookedStrategy)
    assert isinstance(made, kind)
    assert type(made).__name__ == kind.__name__


def test_a_name_that_lightning_does_not_know_is_refused() -> None:
    with pytest.raises(Refused, match=r"trainer\.strategy=ddq: there is no such strategy; use strategy=auto"):
        _named({"strategy": "ddq"})


def test_lightnings_own_fsdp_is_refused_where_there_is_no_gpu(train: Train) -> None:
    by_class = ("~trainer.strategy", "+trainer.strategy._target_=lightning.pytorch.strategies.FSDPStrategy")
    run = train(*by_class, "trainer.accelerator=cpu", "trainer.devices=2", check=False)
    assert run.returncode == 2
    told = "error: trainer.strategy: Lightning's FSDPStrategy needs GPUs; use strategy=fsdp, which also supports CPUs"
    assert run.err.splitlines() == [told]


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA is not available")
@pytest.mark.parametrize(("strategy", "kind"), [(FSDP(), MixedPrecision), (DDP(), None)])
def test_lightning_is_handed_16_mixed_as_a_plugin_where_it_refuses_the_name(
    strategy: Strategy, kind: type[MixedPrecision] | None
) -> None:
    handed = plugins(OmegaConf.create({"trainer": {"precision": "16-mixed"}}), None, [], strategy)["plugins"]
    if kind is None:
        assert handed is None
        return
    (plugin,) = handed
    assert isinstance(plugin, kind)
    assert isinstance(plugin.scaler, torch.amp.GradScaler)


class OwnClipModel(SGDModel):
    """Clips by Lightning's function, to a norm of its own where the Trainer has none."""

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, *_: object, **__: object
    ) -> None:
        if self.global_step == 0:
            print("handed", gradient_clip_val)
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val or 0.05, gradient_clip_algorithm="norm")


OWN_CLIP = ("model._target_=tests.engine.launch.test_build.OwnClipModel", "model.lr=0.5", PLAIN_DATA, *NO_CHECKPOINTS)
OWN_CLIP += ("trainer.max_steps=6", "trainer.log_every_n_steps=1", "global_batch_size=24", "trainer.accelerator=cpu")


def test_a_module_that_clips_itself_is_handed_no_value_that_nobody_typed(train: Train) -> None:
    clipped = (*OWN_CLIP, "trainer=clipped")
    alone = train(*clipped, "strategy=single")
    assert "handed None\n" in alone.out
    assert alone.out.count("clips gradients itself, so trainer.gradient_clip_val=1.0 is ignored; type it to pass") == 1
    for strategy in ("ddp", "fsdp"):
        assert largest_difference(train(*clipped, f"strategy={strategy}", ranks=2), alone) <= 1e-5


@pytest.mark.nightly
def test_a_module_that_clips_itself_is_handed_the_value_that_is_typed(train: Train) -> None:
    run = train(*OWN_CLIP, "strategy=single", "trainer.gradient_clip_val=0.5")
    assert "handed 0.5\n" in run.out
    assert "is ignored" not in run.out


# Values that an optimizer or a schedule of torch's fails with

_OPTIM, _SCHEDULES = "torch.optim", "torch.optim.lr_scheduler"


def _told(target: str, run_mode: str = "fit", **arguments: Any) -> list[str]:
    node = {"_target_": target, "_partial_": True, **arguments}
    return [
        str(one)
        for one in refused_optimizers(OmegaConf.create({"mode": run_mode, "tuned": node, "model": {"by": "${tuned}"}}))
    ]


def test_the_optimizer_that_is_tried_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask the driver of CUDA, and no process that is forked later, such as a plan's, could use a GPU."""
    seen: list[str] = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert _told("torch.optim.AdamW") == []
    hook.remove()
    assert (seen, os.environ["CUDA_VISIBLE_DEVICES"]) == ([""], "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _told("torch.optim.AdamW") == []
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("target", "good", "bad"),
    [
        ("Adam", {}, {"betas": [0.9]}),
        ("AdamW", {"lr": 1e-3}, {"betas": 0.9}),
        ("NAdam", {"lr": 1e-3}, {"betas": [0.9, 0.9, 0.9]}),  # which its constructor takes, and its step does not
        ("AdamW", {}, {"betas": [0.9], "eps": -1, "weight_decay": -0.1}),
        ("SGD", {"nesterov": True, "momentum": 0.9}, {"dampening": 0.5}),
        ("Rprop", {"lr": 0.1}, {"etas": [0.5]}),
        ("lr_scheduler.StepLR", {"gamma": 0.5}, {"step_size": 0}),
        ("lr_scheduler.OneCycleLR", {"max_lr": 0.1, "total_steps": 9}, {"pct_start": 3.0}),
        ("lr_scheduler.ReduceLROnPlateau", {"factor": 0.5}, {"mode": "least"}),
    ],
)
def test_each_value_that_fails_is_told_by_its_key(target: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    told = _told(f"{_OPTIM}.{target}", **good, **bad)
    assert {line.partition("=")[0] for line in told} == {f"tuned.{key}" for key in bad}
    assert not _told(f"{_OPTIM}.{target}", run_mode="test", **bad)  # which makes none


def test_what_the_model_may_yet_add_or_a_gpu_take_is_let_through() -> None:
    assert not _told(f"{_SCHEDULES}.CosineAnnealingLR", eta_min=0.0)  # its T_max
    assert not _told(f"{_SCHEDULES}.OneCycleLR", max_lr=1.0)  # its total_steps
    assert not _told(f"{_OPTIM}.SparseAdam", eps=1e-6)  # its gradients are sparse
    assert not _told(f"{_OPTIM}.AdamW", capturable=True)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD"):
        assert not _told(f"{_OPTIM}.{name}", lr=1e-3, foreach=True)


def test_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    assert _told(f"{_OPTIM}.AdamW", betas=[0.9])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["fit", *at_night("plan")])
def test_a_list_that_is_too_short_is_a_line(train: Train, mode: str) -> None:
    run = train(f"mode={mode}", "optimizer.betas=[0.9]", "strategy=ddp", "trainer.devices=2", check=False)
    assert run.returncode == 2
    assert run.err.splitlines() == [
        "error: optimizer.betas=[0.9]: AdamW fails with it: IndexError: list index out of range; its default is "
        "[0.9,0.999]"
    ]


# What a strategy can't do with a module

NONE = (
    "StepsByHand.training_step returns None in automatic optimization, but all devices have to train on each batch; "
    "return a loss (to skip a batch, 0 times its loss), or set self.automatic_optimization = False if it steps manually"
)


class Raises(PlainModel):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        raise RuntimeError("of my own")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way", "line"),
    [
        ("StepsByHand", "ddp", NONE),
        ("GradientPenalty", "fsdp", "GradientPenalty differentiates a gradient (create_graph=True), which needs each "),
        *at_night(
            ("StepsByHand", "ZeRO 2", NONE),
            ("Snapshot", "fsdp", "Snapshot fails in its first steps under FSDP, which shards parameters over devices"),
            ("PhysicsInformed", "ZeRO 3", "PhysicsInformed fails in its first steps under DeepSpeed, which "),
        ),
    ],
)
def test_what_a_strategy_cannot_do_is_a_line(name: str, way: str, line: str, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(walk.trained, name, way, tmp_path, None)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(line)
    assert "\n" not in str(failed.value.error)


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("deepspeed_stage_3")])
def test_what_a_module_raises_on_purpose_is_its_own(strategy: str, pool: Pool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(trained, Fit(Raises, partial(PlainData, 48), strategy, global_batch=8, micro_batch=4, steps=2))
    assert type(failed.value.error) is RuntimeError
