"""What a log and a terminal show of a run, while it goes and at its end."""

from __future__ import annotations

import logging
import os
import pty
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lightswitch.monitoring import progress
from lightswitch.monitoring.display import clock as clock_text
from lightswitch.monitoring.display import compact, table
from lightswitch.monitoring.notices import Notices
from lightswitch.monitoring.progress import Progress
from tests.engine.fits import PLAIN, trained
from tests.engine.monitoring.conftest import Clock
from tests.engine.monitoring.test_metrics import SaveAt
from tests.engine.monitoring.tiny import BATCH, Engine, Regression, loader, trainer
from tests.engine.plain import ManualModel, PlainModel
from tests.pool import Pool


class Slow(Callback):
    """Makes each step last, by a clock."""

    def __init__(self, clock: Clock, step_seconds: float, evaluation_seconds: float = 0.0) -> None:
        self._step_seconds, self._evaluation_seconds = step_seconds, evaluation_seconds
        self._sleep = clock.sleep

    def on_before_backward(self, *_: Any) -> None:
        self._sleep(self._step_seconds)

    def on_validation_batch_start(self, *_: Any) -> None:
        self._sleep(self._evaluation_seconds)

    def on_test_batch_start(self, *_: Any) -> None:
        self._sleep(self._evaluation_seconds)


def run_of(directory: Path, *callbacks: Callback, tokens: int | None = None, **options: Any) -> Trainer:
    bar = Progress(samples_per_step=BATCH, tokens_per_sample=tokens)
    return trainer(directory, callbacks=[Engine(), *callbacks, bar], **options)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("lightswitch")]


@pytest.fixture(autouse=True)
def info_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def drawn_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is."""
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.0)


def test_a_log_gets_a_line_a_tenth_of_the_run_and_one_a_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], clock: Clock
) -> None:
    run_of(tmp_path, Slow(clock, 0.01), max_steps=50, val_check_interval=5).fit(Regression(), loader(), loader(16))
    lines = lines_of(caplog)
    training = [line for line in lines if "samples/s" in line]
    assert [line.split()[1] for line in training] == [f"{step}/50" for step in range(5, 51, 5)]
    assert len([line for line in lines if "val/loss" in line]) == 10
    assert re.fullmatch(r"step 25/50 · loss [\d.e-]+ · [\d.]+k? samples/s · 0:00 left", training[4])
    out, err = capfd.readouterr()
    assert "\r" not in out + err
    assert "\x1b" not in out + err


def test_what_a_module_asks_the_progress_bar_to_show_stands_in_the_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Asking(Regression):
        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            self.log("accuracy", 0.75, prog_bar=True, on_step=True, on_epoch=True)
            self.log("train_loss", 3.0, prog_bar=True)
            self.log("hidden", 7.0)
            return super().training_step(batch)

        def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
            self.log("val/f1", 0.5, prog_bar=True)

    def fit() -> None:
        run_of(tmp_path, max_steps=20, val_check_interval=10).fit(Asking(), loader(), loader(16))

    fit()
    shown = r"step 20/20 · loss [\d.e-]+ · accuracy 0\.750 · [\d.]+k? samples/s · 0:00 left"
    assert re.fullmatch(shown, next(line for line in lines_of(caplog) if line.startswith("step 20/20 · loss")))
    last = [frame for frame in terminal_frames(fit) if frame.startswith("train ")][-1]
    assert re.search(r" 20/20 · loss [\d.e-]+ · accuracy 0\.750 · val/f1 0\.500 · ", last)


def test_steps_are_optimizer_steps_under_accumulation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(tmp_path, max_steps=-1, max_epochs=4, accumulate_grad_batches=2)
    run.fit(Regression(), loader(), loader(16))
    steps = [line.split()[1] for line in lines_of(caplog) if "val/loss" not in line]
    assert steps == [f"{step}/20" for step in range(2, 21, 2)]


def test_a_resumed_run_counts_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = tmp_path / "at_10.ckpt"
    run_of(tmp_path, SaveAt(10, checkpoint), max_steps=10).fit(Regression(), loader(), loader(16))
    caplog.clear()
    run_of(tmp_path).fit(Regression(), loader(), loader(16), ckpt_path=checkpoint)
    assert lines_of(caplog)[0].startswith("step 12/20")
    assert lines_of(caplog)[-2].startswith("step 20/20")


def test_a_run_without_a_known_end_is_shown_by_its_last_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Any:
            return (((torch.ones(BATCH, 4)), torch.ones(BATCH, 1)) for _ in range(10))

    endless = torch.utils.data.DataLoader(Stream(), batch_size=None)
    run = run_of(tmp_path, max_steps=-1, max_epochs=2, limit_val_batches=0)
    run.fit(Regression(), endless, loader(16))
    assert [line.split(" · ")[0] for line in lines_of(caplog)] == ["step 20"]


@pytest.mark.usefixtures("drawn_each_step")
def test_a_terminal_shows_one_line_that_moves_and_that_an_evaluation_clears(tmp_path: Path) -> None:
    def fit() -> None:
        run = run_of(tmp_path, tokens=64, max_steps=40, val_check_interval=10)
        run.fit(Regression(), loader(), loader(16))

    frames = terminal_frames(fit)
    training = [frame for frame in frames if frame.startswith("train ")]
    assert len(training) >= 40
    assert any(re.search(r"\d+% \|█+ *\| \d+/40 · .* left$", frame) for frame in training)
    last = r"train 100% \|█{4,}\| 40/40 · loss [\d.e-]+ · val [\d.e-]+ · [\d.]+[kM]? tokens/s · 0:00 left"
    assert re.fullmatch(last, training[-1])
    frames = terminal_frames(lambda: run_of(tmp_path).test(Regression(), loader(800), verbose=False))
    assert any(re.fullmatch(r"test +\d+% \|█+ *\| \d+/100", frame) for frame in frames)
    assert frames[-1] == ""


@pytest.mark.usefixtures("drawn_each_step")
def test_a_line_on_a_terminal_that_has_closed_is_lost_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as closed:
        os.close(controller)
        monkeypatch.setattr(sys, "stdout", closed)
        run_of(tmp_path, max_steps=10).fit(Regression(), loader(), loader(16))


@pytest.mark.usefixtures("drawn_each_step")
def test_what_a_module_prints_or_logs_stands_on_lines_of_its_own(tmp_path: Path) -> None:
    class Tells(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 10:
                logging.getLogger("says").warning("a quarter of it")
            if trainer.global_step == 20:
                print("half", "of it")

    def fit() -> None:
        logging.root.handlers = [logging.StreamHandler(sys.stdout)]
        run_of(tmp_path, Tells(), max_steps=40).fit(Regression(), loader(), loader(16))
        print("printed after it")

    frames = terminal_frames(fit)
    assert {"a quarter of it", "half of it", "printed after it"} <= set(frames)
    below = filter(None, frames[frames.index("half of it") + 1 :])
    assert next(below).startswith("train ")


def terminal_frames(work: Callable[[], object]) -> list[str]:
    """What a forked process sends to a terminal of 80 columns, split where the cursor goes back or down."""
    child, terminal = pty.fork()
    if child == 0:
        code = 1
        try:
            os.environ["COLUMNS"] = "80"
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            work()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(code)
    output = _read_all(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, output
    return [frame.rstrip("\n") for frame in output.replace("\x1b[K", "").replace("\r\n", "\r").split("\r")]


def _read_all(terminal: int) -> str:
    chunks = []
    try:
        while chunk := os.read(terminal, 1 << 16):
            chunks.append(chunk)
    except OSError:  # Linux's way to say that the other end is closed
        pass
    return b"".join(chunks).decode()


def test_a_table_has_names_left_values_right_numbers_of_three_digits_and_durations_as_a_clock() -> None:
    rows = {"train/loss": 2.30258, "steps": 1000, "samples": 64_000, "time": timedelta(seconds=21.4), "none": None}
    lines = ["train/loss   2.303", "steps        1,000", "samples     64,000", "time          0:21"]
    assert (table(rows).splitlines(), table({})) == (lines, "")
    numbers = {0: "0", 3.14159: "3.14", 42.06: "42.1", 370: "370", 999.7: "1k", 45_213: "45.2k", 1.23e6: "1.23M"}
    assert {number: compact(number) for number in numbers} == numbers
    durations = {0: "0:00", 59.6: "1:00", 3723: "1:02:03", 183_600: "51:00:00"}
    assert {seconds: clock_text(seconds) for seconds in durations} == durations


# What a run says of its model, once hooks have built it, and of an epoch of batches in which no step is counted


class BuiltInSetup(Regression):
    """As Lightning's documentation has it, where the data tell a size; a lazy layer is asked for it."""

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 1))  # of another size than before
        self.net(next(iter(loader()))[0])


class BuiltTwice(BuiltInSetup):
    def configure_model(self) -> None:
        self.net = nn.Sequential(self.net, nn.Linear(1, 1))


@pytest.mark.parametrize(("model", "parameters"), [(Regression, 49), (BuiltInSetup, 31), (BuiltTwice, 33)])
def test_a_model_is_counted_when_its_hooks_have_built_it(
    model: type[Regression], parameters: int, tmp_path: Path
) -> None:
    size = Notices()
    trainer(tmp_path, callbacks=[size], max_steps=1).fit(model(), loader(), loader())
    assert size.counts == {"parameters": parameters, "trained_parameters": parameters}


class PastLightning(ManualModel):
    """Moves its weights by itself, past its optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = PlainModel.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.sub_(0.05 * parameter.grad)
                parameter.grad = None
        return loss


FIT = replace(PLAIN, callbacks=(Notices,), micro_batch=None)
NO_STEP = "no step    in an epoch of 9 batches, no optimizer step was counted"


def test_steps_that_are_not_counted_are_told_after_the_first_epoch_and_others_not(pool: Pool) -> None:
    assert "no step" not in pool(1)(trained, replace(FIT, arguments="max_epochs=2", steps=18))[0].told
    by_hand = replace(FIT, module=PastLightning, arguments="gradient_clip_val=null max_epochs=2")
    assert pool(1)(trained, by_hand)[0].told.count(NO_STEP) == 1
