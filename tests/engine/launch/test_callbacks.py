"""Lightning's own callbacks: those that a run serves are beside one another, the others are refused in a line.

What they do to weights and checkpoints under each strategy: strategies/test_module_shapes.py, Averaging and Unfreezing.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from lightning.pytorch import Callback, Trainer, callbacks

from lightswitch.strategies import callbacks as known
from lightswitch.strategies.fsdp import FSDP
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


@pytest.mark.parametrize("name", [*known.NOWHERE, *known.OF_WHOLE_PARAMETERS])
def test_what_can_not_be_served_is_told_of_a_class_and_of_those_made_from_it(name: str) -> None:
    base = getattr(callbacks, name)
    mine = type("Mine", (base,), {})
    for kind in (base, mine):
        (line,) = known.refused(_trainer(FSDP(), [kind.__new__(kind)]))
        assert line.startswith(f"{kind.__name__}: ")
    served = list(known.refused(_trainer(Single(), [mine.__new__(mine)])))
    assert bool(served) == (name in known.NOWHERE)


def test_accumulation_by_schedule_is_for_steps_that_lightning_takes() -> None:
    trainer = _trainer(Single(), [callbacks.GradientAccumulationScheduler({0: 2})])
    trainer.strategy.connect(ManualModel())
    told = "ManualModel optimizes by hand; leave the callback out, and accumulate in training_step"
    assert list(known.refused(trainer)) == [f"GradientAccumulationScheduler: {told}"]
    trainer.strategy.connect(PlainModel())
    assert list(known.refused(trainer)) == []


def test_callbacks_that_a_run_serves_are_beside_one_another_and_after_a_resume(train: Train) -> None:
    given = [f"callbacks.{name.lower()}._target_={NAMED}.{name}" for name in BESIDE]
    given += [f"callbacks.{name.lower()}.{argument}" for name, argument in BESIDE.items() if argument]
    given += [f"callbacks.often._target_={NAMED}.ModelCheckpoint", "callbacks.often.dirpath=often"]
    given += ["callbacks.often.every_n_train_steps=2", "callbacks.often.save_top_k=-1", "~callbacks.progress"]
    run = (*PLAIN, *given, "global_batch_size=40", "run_id=mine")
    begun = train(*run, "trainer.max_steps=4")
    assert sorted(path.name for path in (begun.folder / "often").iterdir()) == [
        "epoch=0-step=2.ckpt",
        "epoch=0-step=4.ckpt",
    ]
    assert "resumes " in train(*run, "trainer.max_steps=6", folder=begun.folder).out


def _trainer(strategy: FSDP | Single, given: list[Callback]) -> Trainer:
    trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.callbacks = given
    return trainer
