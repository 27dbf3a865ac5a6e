"""Lightning's own callbacks: those that a run serves are beside one another, the others are refused in a line.

What they do to weights and checkpoints under each strategy: strategies/test_module_shapes.py, Averaging and Unfreezing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import pytest
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf import OmegaConf

from lightswitch.launch.build import trainer_arguments
from lightswitch.strategies import known_callbacks
from lightswitch.strategies.ddp import Single
from lightswitch.strategies.fsdp import FSDP
from tests.engine.conftest import PLAIN, Train

NAMED = "lightning.pytorch.callbacks"
BESIDE = {  # what each is given, in one run
    "EMAWeightAveraging": "decay=0.9",
    "LambdaCallback": None,
    "OnExceptionCheckpoint": "dirpath=failed",
    **({"RichModelSummary": None} if find_spec("rich") else {}),
    "Timer": "duration=00:00:10:00",
    "TQDMProgressBar": None,
}


def _deepspeed(**options: Any) -> Strategy:
    strategy: Strategy = pytest.importorskip("lightswitch.deepspeed.strategy").DeepSpeed(**options)
    return strategy


OF_PORTABLE = known_callbacks.OF_PORTABLE_CHECKPOINTS
ON_NVME = partial(_deepspeed, stage=3, offload_optimizer=True, offload_optimizer_device="nvme")
UNSERVED = [  # a callback, what does not serve it, what is told of it, and what does serve it
    *((name, FSDP, told, ()) for name, told in known_callbacks.NOWHERE.items()),
    ("EMAWeightAveraging", DDPStrategy, OF_PORTABLE["WeightAveraging"], (Single, FSDP)),
    ("BackboneFinetuning", DDPStrategy, OF_PORTABLE["BaseFinetuning"], (Single, FSDP)),
    ("BackboneFinetuning", ON_NVME, "state that DeepSpeed offloads to NVMe ", (partial(_deepspeed, stage=3),)),
]


def test_a_callback_that_no_resume_could_follow_is_refused_with_what_to_use(train: Train) -> None:
    given = (f"callbacks.mine._target_={NAMED}.StochasticWeightAveraging", "callbacks.mine.swa_lrs=0.1")
    refused = train(*PLAIN, *given, check=False)
    assert (refused.returncode, refused.err) == (
        2,
        "error: StochasticWeightAveraging: a resumed run could not continue it, because it replaces the schedule "
        "during the run; use lightning.pytorch.callbacks.EMAWeightAveraging\n",
    )


@pytest.mark.parametrize(("name", "refusing", "told", "serving"), UNSERVED)
def test_what_a_strategy_can_not_serve_is_told_of_a_class_and_of_those_made_from_it(
    name: str, refusing: Callable[[], Strategy], told: str, serving: Sequence[Callable[[], Strategy]]
) -> None:
    base = getattr(callbacks, name)
    for kind in (base, type("Mine", (base,), {})):
        callback = kind.__new__(kind)
        (line,) = known_callbacks.problems([callback], refusing(), devices=2)
        assert line.startswith(f"{kind.__name__}: {told}")
        assert [*chain(*(known_callbacks.problems([callback], serves(), devices=2) for serves in serving))] == []


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
