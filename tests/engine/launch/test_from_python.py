"""Runs that a notebook or a script starts: the words of the command line, and what comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, random_split

import lightswitch
from lightswitch.errors import ExitCode, Refused
from tests.engine.conftest import CHECKOUT, PLAIN
from tests.engine.plain import PlainData, Points
from tests.night import at_night

NOTEBOOK = CHECKOUT / "docs" / "notebook.ipynb"
SHORT = (*PLAIN, "strategy=single", "trainer.accelerator=cpu", "trainer.max_steps=4", "trainer.val_check_interval=2")


class SplitData(PlainData):
    def setup(self, stage: str) -> None:
        self.training, self.held_out = random_split(Points(70), [50, 20])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("train.py", "conf", "src", "tests"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    return tmp_path


@pytest.mark.nightly
def test_the_notebook_of_the_pages_runs_cell_by_cell(project: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    script = "\n".join("".join(cell["source"]) for cell in cells) + "\nprint(run.metrics['val/loss'], run.directory)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    loss, directory = told.stdout.splitlines()[-1].split()
    assert 0 < float(loss) < 6
    assert Path(directory).parent == project / "runs" / "gpt"
    assert "step 20/20" in told.stdout
    assert "2 devices" in told.stdout


def test_a_run_is_returned_with_its_metrics_model_and_data_as_it_has_split_them() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    split = f"data._target_={__name__}.SplitData"
    run = lightswitch.train(*SHORT, split, "run_id=mine", "trainer.max_steps=2")
    assert run.directory == Path("runs/plainmodel/mine").absolute()
    assert run.config.trainer.max_steps == 2

    model, data = run.load(), run.data()
    assert torch.equal(torch.get_rng_state(), before)
    (batch,) = data.val_dataloader()
    assert not model.training
    loss = cross_entropy(model.net(batch[0]), batch[1])
    assert float(loss) == pytest.approx(run.metrics["val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("optimizer.lrr=1", "optimizer.lrr: AdamW takes no lrr. Did you mean lr?"),
        *at_night(("optimizer.lr=-3", "optimizer.lr=-3: use a number from 0")),
    ],
)
def test_a_refused_run_raises_the_line_of_its_command(word: str, line: str) -> None:
    with pytest.raises(lightswitch.FailedRun, match=line.replace("?", r"\?")) as failed:
        lightswitch.train("optimizer=adamw", word)
    assert failed.value.exit_code == ExitCode.REFUSED


def test_words_that_cannot_be_composed_and_sweeps_are_refused_at_once() -> None:
    with pytest.raises(Refused, match="Did you mean"):
        lightswitch.compose("strategy=fdsp")
    with pytest.raises(Refused, match="type a sweep as a command"):
        lightswitch.train("-m", "seed=1,2")
    with pytest.raises(Refused, match="found no nowhere"):
        lightswitch.compose(script="nowhere.py")


@pytest.mark.nightly
def test_an_interrupt_saves_a_checkpoint_and_is_raised_after_it(project: Path) -> None:
    words = [*SHORT, "trainer.max_steps=100000", "run_id=mine", "trainer.val_check_interval=100000"]
    script = (
        f"import lightswitch\ntry:\n    lightswitch.train(*{words})\nexcept KeyboardInterrupt:\n    print('raised')"
    )
    with subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert "stopped    by SIGTERM" in rest
    assert rest.endswith("raised\n")
    assert (project / "runs/plainmodel/mine/checkpoints/last.ckpt").exists()
