"""The tables of docs/your-own-code.md and docs/fork.md, and the runs that type what they say."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tests.engine.conftest import CHECKOUT
from tests.engine.launch.migration_runs import RUNS, Inside, Left, Seen, Shown
from tests.engine.launch.migrations import ROWS

PAGE = "\n".join((CHECKOUT / "docs" / name).read_text() for name in ("your-own-code.md", "fork.md"))
CODE = re.compile(r"`([^`]+)`")
SECTIONS = re.findall(r"^##+ (I .*)$", PAGE, re.MULTILINE)


def rows(heading: str) -> Iterator[tuple[str, str]]:
    """The two cells of each row of a section's table."""
    (section,) = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]:
        there, here = line.split(" | ")
        if not there.startswith("---"):
            yield there, here


def spans(here: str) -> list[list[str]]:
    """What a cell says to type to train.py: the words of each span of code."""
    spans = [[word for word in code.split() if "=" in word or word[0] == "~"] for code in CODE.findall(here)]
    return [span for span in spans if span]


def words(here: str) -> list[str]:
    return [word for span in spans(here) for word in span]


def shown_of_rows() -> Iterator[tuple[str, str, Shown]]:
    """What shows each row: a name of it, the row's words, and how."""
    for section, table in ROWS.items():
        here = dict(rows(section))
        for there, all_of_row in table.items():
            for number, shown in enumerate(all_of_row, 1):
                yield f"{section}, {there}, {number}", here.get(there, ""), shown


def inside(run: str) -> Iterator[tuple[str, Inside]]:
    """The looks into a run's process, by name."""
    for name, _, shown in shown_of_rows():
        if isinstance(shown, Inside) and shown.run == run:
            yield name, shown


def command(run: str) -> list[str]:
    """What a run types: its own words and those of its rows, of which no two are of one key.

    Raises:
        ValueError: two rows need runs of their own.
    """
    asked = _asked(run)
    keys = [word.partition("=")[0] for word in asked]
    if len(keys) != len(set(keys)):
        raise ValueError(f"{run}: {asked}")
    return [*asked, f"callbacks.effects._target_={__name__}.Effects", f"callbacks.effects.run={run}"]


def typed(here: str, shown: Inside | Left) -> list[str]:
    """What a row has its run type."""
    return words(here) if shown.typed is None else shown.typed.split()


def _asked(run: str) -> list[str]:
    before = RUNS[run].after
    asked = [*(_asked(before) if before else ()), *RUNS[run].typed.split()]
    for _, here, shown in shown_of_rows():
        if isinstance(shown, Inside | Left) and shown.run == run:
            asked += typed(here, shown)
    return list(dict.fromkeys(asked))


class Effects(Callback):
    """Writes what the looks of a run's rows find to effects.json, and ends the process there, or the training."""

    def __init__(self, run: str) -> None:
        self.run, self.dtype, self.written = run, torch.float32, False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        linear = next(module for module in pl_module.modules() if isinstance(module, nn.Linear))
        linear.register_forward_hook(self._note_dtype)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, _: int) -> None:
        if self.written or not trainer.global_step:
            return
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        seen = Seen(trainer, batch, self.dtype, float(nn.utils.get_total_norm(gradients)))
        Path(f"effects_{self.run}.json").write_text(
            json.dumps({name: shown.look(seen) for name, shown in inside(self.run)})
        )
        self.written = True
        if RUNS[self.run].ends:
            os._exit(0)
        trainer.should_stop = True

    def _note_dtype(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.dtype = output.dtype
