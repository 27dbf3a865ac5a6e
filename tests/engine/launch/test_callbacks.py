"""Lightning's own callbacks: those that a run serves are beside one another, the others are refused in a line.

What they do to weights and checkpoints under each strategy: strategies/test_module_shapes.py, Averaging and Unfreezing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from omegaconf import OmegaConf

from lightswitch.launch.callbacks import trainer_arguments
from lightswitch.strategies import callbacks as known
from lightswitch.strategies.fsdp import FSDP
from lightswitch.strategies.fsdp1 import FSDP1
from lightswitch.strategies.single import Single
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import ManualModel, PlainModel

NAMED = "lightning.pytorch.callbacks"
BESIDE = {  # what each is given, in one run
    "EMAWeightAveraging": "decay=0.9",
    "LambdaCallback": None,
    "OnExceptionCheckpoint": "dirpath=failed",
    **({"RichModelSummary": None} if find_spec("rich") else {}),
    "Timer": "duration=00:00:10:00",
    "TQDMProgressBar": None,
}


def test_a_callback_that_no_resume_could_follow_is_refused_with_what_to_use(train: Train) -> None:
    given = (f"callbacks.mine._target_={NAMED}.StochasticWeightAveraging", "callbacks.mine.swa_lrs=0.1")
    refused = train(*PLAIN, *given, check=False)
    assert (refused.returncode, refused.err) == (
        2,
        "error: StochasticWeightAveraging: a resumed run could not follow it, as it replaces the schedule in mid-run; "
        "use lightning.pytorch.callbacks.EMAWeightAveraging\n",
    )


@pytest.mark.parametrize("name", known.NOWHERE)
def test_what_can_not_be_served_is_told_of_a_class_and_of_those_made_from_it(name: str) -> None:
    base = getattr(callbacks, name)
    mine = type("Mine", (base,), {})
    for kind in (base, mine):
        (line,) = known.refused(_trainer(FSDP1(), [kind.__new__(kind)]))
        assert line.startswith(f"{kind.__name__}: ")


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "BackboneFinetuning"])
def test_averages_and_unfrozen_layers_are_saved_by_the_projects_own_strategies_alone(name: str) -> None:
    callback = getattr(callbacks, name)()
    (line,) = known.refused(_trainer(DDPStrategy(), [callback]))
    assert line in {f"{name}: {told}" for told in known.OF_PORTABLE_CHECKPOINTS.values()}
    for strategy in (Single(), FSDP(), FSDP1()):
        assert list(known.refused(_trainer(strategy, [callback]))) == []


def test_accumulation_by_schedule_is_for_steps_that_lightning_takes() -> None:
    trainer = _trainer(Single(), [callbacks.GradientAccumulationScheduler({0: 2})])
    trainer.strategy.connect(ManualModel())
    told = "ManualModel optimizes by hand; leave the callback out, and accumulate in training_step"
    assert list(known.refused(trainer)) == [f"GradientAccumulationScheduler: {told}"]
    trainer.strategy.connect(PlainModel())
    assert list(known.refused(trainer)) == []


@pytest.mark.parametrize("name", known.OF_COUNTED_STEPS)
def test_lightnings_own_deepspeed_strategy_counts_steps_by_itself(name: str) -> None:
    of_engine: Any = pytest.importorskip("lightswitch.deepspeed.strategy")
    callback = getattr(callbacks, name)
    given = [callback.__new__(callback)]
    (line,) = known.problems(given, None, DeepSpeedStrategy(), devices=2)
    assert line.startswith(f"{name}: Lightning's own DeepSpeedStrategy does not serve it; use strategy=deepspeed_")
    assert list(known.problems(given, None, of_engine.DeepSpeed(), devices=2)) == []


@pytest.mark.parametrize("name", ["LearningRateFinder", "BackboneFinetuning"])
def test_what_lies_on_nvme_is_not_changed_in_mid_run(name: str) -> None:
    of_engine: Any = pytest.importorskip("lightswitch.deepspeed.strategy")
    strategy = of_engine.DeepSpeed(stage=3, offload_optimizer=True, offload_optimizer_device="nvme")
    (line,) = known.problems([getattr(callbacks, name)()], None, strategy, devices=2)
    assert line.startswith(f"{name}: what DeepSpeed keeps on NVMe ")
    assert list(known.problems([getattr(callbacks, name)()], None, of_engine.DeepSpeed(stage=3), devices=2)) == []


def test_callbacks_that_a_run_serves_are_beside_one_another_and_after_a_resume(train: Train) -> None:
    given = [f"callbacks.{name.lower()}._target_={NAMED}.{name}" for name in BESIDE]
    given += [f"callbacks.{name.lower()}.{argument}" for name, argument in BESIDE.items() if argument]
    given += [f"callbacks.often._target_={NAMED}.ModelCheckpoint", "callbacks.often.dirpath=often"]
    given += ["callbacks.often.every_n_train_steps=2", "callbacks.often.save_top_k=-1"]
    run = (*PLAIN, *given, "global_batch_size=40", "run_id=mine")
    begun = train(*run, "trainer.max_steps=4")
    assert sorted(path.name for path in (begun.folder / "often").iterdir()) == [
        "epoch=0-step=2.ckpt",
        "epoch=0-step=4.ckpt",
    ]
    other_bar = [f"callbacks.tqdmprogressbar._target_={NAMED}.RichProgressBar"] if find_spec("rich") else []
    resumed = train(*run, *other_bar, "trainer.max_steps=6", folder=begun.folder)
    assert "resumes " in resumed.out
    assert all("loss" not in line for run in (begun, resumed) for line in run.out.splitlines() if "step " in line)


@pytest.mark.parametrize(
    ("typed", "bars", "given"),
    [
        ({}, [], {"enable_progress_bar": False}),
        ({}, [callbacks.TQDMProgressBar()], {}),
        ({"enable_progress_bar": True}, [], {}),  # Lightning's own
    ],
)
def test_a_run_whose_bar_was_removed_has_none(
    typed: dict[str, Any], bars: list[Callback], given: dict[str, Any]
) -> None:
    assert trainer_arguments(bars, OmegaConf.create(typed)) == given


def _trainer(strategy: Strategy, given: list[Callback]) -> Trainer:
    trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.callbacks = given
    return trainer
