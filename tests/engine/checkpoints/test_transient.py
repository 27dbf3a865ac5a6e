"""Buffers that are not persistent and that training changes go on over a resume, as those of a module's state do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.conftest import PLAIN_DATA, Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.plain import PlainModel
from tests.night import at_night


class Counts(PlainModel):
    """Weighs its loss by what it has seen; ``queue`` grows, and ``table`` stays what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("queue", torch.zeros(0, 2), persistent=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += 1
        self.queue = torch.cat([self.queue, self.table[:2, None].expand(2, 2) + len(self.queue)])[-6:]
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.seen) + self.queue.mean()


RUN = (
    *("model._target_=tests.engine.checkpoints.test_transient.Counts", PLAIN_DATA, "trainer.accelerator=cpu"),
    *("global_batch_size=24", "trainer.max_steps=6", "trainer.log_every_n_steps=1", "run_id=mine"),
    *("callbacks.last_checkpoint.every_n_steps=2", "callbacks.last_checkpoint.keep=9"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("whole"))(*RUN, "strategy=single")


@pytest.mark.parametrize(
    ("begun", "ended"), [("ddp", "fsdp"), *at_night(("deepspeed_stage_2", "ddp"), ("fsdp", "single"))]
)
def test_they_go_on_under_another_strategy(begun: str, ended: str, whole: Finished, train: Train) -> None:
    stopped = train(*RUN, f"strategy={begun}", "trainer.max_steps=2", ranks=2)
    resumed = train(*RUN, f"strategy={ended}", ranks=0 if ended == "single" else 2, folder=stopped.folder)
    assert largest_difference(resumed, whole) <= 1e-5
    assert _transient(whole.run_dir) == {"transient.seen", "transient.queue"}


def _transient(run_dir: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    saved = FileSystemReader(run_dir / "checkpoints/step_6.ckpt").read_metadata().state_dict_metadata
    return {name for name in saved if name.startswith("transient")}
