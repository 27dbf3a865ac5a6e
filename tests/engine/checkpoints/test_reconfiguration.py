"""What is configured otherwise on a resume, in optimizers and schedules, has its effect; all else goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from tests.engine.conftest import PLAIN, PLAIN_DATA, Finished, Train, runs_in
from tests.engine.plain import PlainModel
from tests.night import at_night

Make = Callable[[Optimizer, float, int], LRScheduler]
SCHEDULES: dict[str, Make] = {  # of a rate and a number of steps
    "cosine": lambda optimizer, rate, steps: CosineAnnealingLR(optimizer, steps),
    "exponential": lambda optimizer, rate, steps: ExponentialLR(optimizer, 1 - 1 / steps),
    "by a function, from zero": lambda optimizer, rate, steps: LambdaLR(optimizer, lambda step: step / steps),
    "in sequence": lambda optimizer, rate, steps: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, steps - 3)], [3]
    ),
    "in a chain": lambda optimizer, rate, steps: ChainedScheduler(
        [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, steps)]
    ),
    "one cycle": lambda optimizer, rate, steps: OneCycleLR(optimizer, rate, total_steps=max(13, steps)),
    "milestones": lambda optimizer, rate, steps: MultiStepLR(optimizer, [3, steps - 3]),
    "by a metric": lambda optimizer, rate, steps: ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}
STEPS = 6  # of each optimizer before the resume, and after it
BY_METRIC = "by a metric"


class Scheduled(PlainModel):
    """Steps an optimizer for each schedule.

    Args:
        steps: of all schedules.
        cosine: name of the schedule that is taken as the first one; empty for none.
    """

    def __init__(self, lr: float = 0.1, steps: int = STEPS, first: str = "cosine") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.weights = nn.ParameterList(torch.ones(1) for _ in SCHEDULES)

    def configure_optimizers(self) -> Any:
        optimizers = [SGD([weight], lr=self.hparams.lr, momentum=0.9) for weight in self.weights]
        pairs = zip(optimizers, [self.hparams.first, *list(SCHEDULES)[1:]], strict=True)
        return [
            {"optimizer": one, **({"lr_scheduler": self._schedule(one, name)} if name else {})} for one, name in pairs
        ]

    def _schedule(self, optimizer: Optimizer, name: str) -> dict[str, Any]:
        schedule = SCHEDULES[name](optimizer, self.hparams.lr, self.hparams.steps)
        return {"scheduler": schedule, "monitor": "none"} if name == BY_METRIC else {"scheduler": schedule}

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        loss = torch.stack([weight.square().sum() for weight in self.weights]).sum()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        for schedule in self.lr_schedulers():
            schedule.step(*([1.0] if isinstance(schedule, ReduceLROnPlateau) else []))


RUN = (f"model._target_={__name__}.Scheduled", PLAIN_DATA, "run_id=mine", "trainer.accelerator=cpu")
RUN += ("trainer.log_every_n_steps=1", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
FIRST, WHOLE = (f"trainer.max_steps={count * STEPS * len(SCHEDULES)}" for count in (1, 2))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("first"))(*RUN, FIRST)


def _rates(run: Finished) -> dict[str, list[float]]:
    columns = {name: f"lr-SGD-{index}" if index else "lr-SGD" for index, name in enumerate(SCHEDULES)}
    return {
        name: [rate for step, rate in run.column(column).items() if step >= STEPS] for name, column in columns.items()
    }


@pytest.mark.parametrize(
    "words",
    [
        *((), *at_night((("model.lr=0.05",),))),
        *(("model.steps=12",), *at_night((("model.first=exponential", "model.steps=12"),))),
    ],
)
def test_a_schedule_goes_on_as_if_it_had_been_so_from_the_start(
    words: tuple[str, ...], first: Finished, train: Train
) -> None:
    whole = _rates(train(*RUN, *words, WHOLE))
    resumed = _rates(train(*RUN, *words, WHOLE, f"resume={first.run_dir}/checkpoints/last.ckpt"))
    for name in SCHEDULES:
        assert len(whole[name]) == STEPS
        assert resumed[name] == (whole[name] if not words else pytest.approx(whole[name], rel=1e-6)), name


PLAIN_RUN = (*PLAIN, "run_id=mine", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1")


@pytest.mark.parametrize("strategy", ["single", "fsdp", *at_night("deepspeed_stage_2")])
def test_a_run_takes_another_rate(strategy: str, train: Train) -> None:
    run = (*PLAIN_RUN, "model.halved=step", f"strategy={strategy}")  # after seven steps
    first = train(*run, "model.lr=0.1", "trainer.max_steps=2")
    resumed = train(*run, "model.lr=0.01", "trainer.max_steps=4", folder=first.folder)
    assert "with model.lr=0.01 (was 0.1)" in resumed.out
    assert [*resumed.column("lr-AdamW").values()] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    again = train(*run, "model.lr=0.01", "trainer.max_steps=8", folder=first.folder)
    assert [*again.column("lr-AdamW").values()] == pytest.approx([0.1, 0.1, *[0.01] * 5, 0.005])
