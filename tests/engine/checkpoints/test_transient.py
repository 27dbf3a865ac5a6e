"""Buffers that are not persistent and that training changes go on over a resume, as those of a module's state do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lightswitch
from lightswitch.checkpoints.portable import TransientBuffers
from lightswitch.export.__main__ import main
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


class Measured(Counts):
    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test/seen", self.seen.float())


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


@pytest.mark.parametrize("name", [".", "checkpoints/last.ckpt", "model.ckpt", "exported.ckpt"])
def test_a_loaded_model_has_them(name: str, whole: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "exported.ckpt":
        main([str(whole.run_dir), "-o", str(whole.run_dir / name), "--dtype", "bfloat16"])
        assert "left out   queue, seen, which training has changed and the module regist" in capsys.readouterr().out
    model = lightswitch.load(whole.run_dir / name)
    assert int(model.seen) == 6
    assert len(model.queue) == 6
    assert model.table.tolist() == [0, 1, 2, 3]
    assert model.queue.dtype == model.dtype


@pytest.mark.parametrize("checkpoint", ["checkpoints/last.ckpt", "model.ckpt"])
def test_an_evaluation_of_an_export_has_them(checkpoint: str, whole: Finished, train: Train) -> None:
    test = ("mode=test", f"ckpt_path={whole.run_dir}/{checkpoint}", "run_id=tested")
    tested = train(*(f"{word.replace('Counts', 'Measured')}" for word in RUN), *test)
    assert [*tested.column("test/seen").values()] == [6.0]


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_a_format_without_a_place_for_them_is_told(
    name: str, whole: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(whole.run_dir), "-o", str(tmp_path / name)])
    assert "left out   queue, seen, which training has changed" in (printed := capsys.readouterr().out)
    assert "of this format; -o NAME.ckpt keeps them" in printed
    assert int(lightswitch.load(tmp_path / name).seen) == 0


@pytest.mark.parametrize("view", ["torch.arange(6.0)[::2]", "torch.ones(1).expand(3)", "torch.tensor([1j]).conj()"])
def test_a_buffer_may_be_a_view(view: str) -> None:
    module, callback = PlainModel(), TransientBuffers()
    trainer: Any = None  # which neither hook looks at
    module.register_buffer("view", eval(view), persistent=False)
    saved: dict[str, Any] = {}
    callback.on_fit_start(trainer, module)
    callback.on_save_checkpoint(trainer, module, saved)
    assert not saved
    module.view = module.view + 1
    callback.on_save_checkpoint(trainer, module, saved)
    assert saved


def _transient(run_dir: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    saved = FileSystemReader(run_dir / "checkpoints/step_6.ckpt").read_metadata().state_dict_metadata
    return {name for name in saved if name.startswith("transient")}
