"""What Lightning's users have in their modules and fingers does what its name says, or a line says what to type."""

from __future__ import annotations

import pytest

from tests.engine.conftest import PLAIN, Train

RUN = (
    *PLAIN,
    "logger=csv",
    "~callbacks.lr_monitor",
    "global_batch_size=40",
    "trainer.log_every_n_steps=1",
)  # 5 an epoch


# How long, and how often


@pytest.mark.parametrize(
    ("typed", "steps", "validated"),
    [
        (("trainer.max_epochs=2",), 10, [4, 9]),
        (("trainer.max_epochs=2", "trainer.max_steps=7"), 7, [4]),
        (("trainer.max_epochs=2", "trainer.val_check_interval=4", "trainer.check_val_every_n_epoch=null"), 10, [3, 7]),
        (("trainer.max_steps=10", "trainer.check_val_every_n_epoch=1"), 10, [4, 9]),
        (("trainer.max_steps=10", "trainer.val_check_interval=4"), 10, [3, 7]),
    ],
)
def test_a_run_ends_and_validates_by_what_was_typed_and_not_by_a_default(
    typed: tuple[str, ...], steps: int, validated: list[int], train: Train
) -> None:
    run = train(*RUN, *typed)
    assert list(run.column("train/loss")) == list(range(steps))
    assert list(run.column("val/loss")) == validated


def test_a_run_ends_by_time_and_not_by_a_default(train: Train) -> None:
    run = train(*RUN, "trainer.max_time=00:00:00:05", "callbacks.last_checkpoint.every_n_steps=1000")
    assert max(run.column("train/loss")) > 500
