"""docs/your-own-code.md and docs/fork.md: their right columns can be typed, and callbacks do what the table says."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from safetensors.torch import save_file
from torch import nn

from lightswitch.strategies.callbacks import NOWHERE, OF_ONE_PROCESS
from tests.engine.config.mistaken import refused
from tests.engine.conftest import CHECKOUT, Finished, runs_in

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


def test_what_the_tables_say_to_type_is_taken(tmp_path: Path) -> None:
    found = [span for name in SECTIONS for _, here in rows(name) for span in spans(here)]
    assert len(found) > 60
    assert refused(found, tmp_path) == {}


def test_the_table_of_callbacks_is_what_the_code_does() -> None:
    told = {CODE.findall(name)[0]: here for name, here in rows("Lightning's callbacks")}
    assert sorted(told) == sorted(callbacks.__all__)
    assert {name for name, here in told.items() if here.startswith("refused")} == set(NOWHERE)
    assert {name for name, here in told.items() if "refused on several devices" in here} == set(OF_ONE_PROCESS)


# Rows of the tables in docs/your-own-code.md and docs/fork.md have the effect that they tell


HERE = {there: here for section in SECTIONS for there, here in rows(section)}
ROWS: dict[str, list[dict[str, Any]]] = yaml.safe_load((Path(__file__).parent / "migrations.yaml").read_text())


class Run(NamedTuple):
    """A run of train.py: what makes it short, and whether nothing is looked at that it does after its first step."""

    typed: str = ""
    ends: bool = True
    after: str | None = None  # the run in whose folder it starts, with its words
    write: Callable[[Path], None] = lambda folder: None  # its data


class Seen(NamedTuple):
    """A run after its first step."""

    trainer: Trainer
    batch: Any
    dtype: torch.dtype  # what the first linear layer computes in
    gradient_norm: float


def _write_tokens(folder: Path) -> None:
    """nanoGPT's files, and GPT-2's embedding of their 300 tokens, all of it ones, in a folder of the name FOLDER."""
    for split in ("train", "val"):
        (folder / "data/openwebtext").mkdir(parents=True, exist_ok=True)
        (np.arange(30_000, dtype=np.uint16) % 300).tofile(folder / f"data/openwebtext/{split}.bin")
    (folder / "FOLDER").mkdir()
    save_file({"transformer.wte.weight": torch.ones(300, 16)}, folder / "FOLDER/model.safetensors")


def _write_images(folder: Path) -> None:
    """Fashion-MNIST's files, of 240 images and 60."""
    (folder / "data/fashion-mnist").mkdir(parents=True)
    for split, count in (("train", 240), ("t10k", 60)):
        for name, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
            path = folder / f"data/fashion-mnist/{split}-{name}-ubyte"
            path.write_bytes(header + (np.arange(math.prod(shape)) % 10).astype(np.uint8).tobytes())


def _write_text(folder: Path) -> None:
    (folder / "shards").mkdir()
    for number in range(3):
        (folder / f"shards/{number}.txt").write_text("a" * 20_000)


_TINY = "model.layers=1 model.width=16 model.sample_tokens=8 logger=csv"
RUNS = {
    "epochs": Run(f"{_TINY} trainer.limit_train_batches=2"),
    "steps": Run(_TINY),
    "template": Run(
        f"{_TINY} trainer.limit_train_batches=2 trainer.limit_val_batches=0 trainer.limit_test_batches=0 "
        "trainer.log_every_n_steps=1",
        ends=False,
    ),
    "transformers": Run(f"{_TINY} trainer.limit_val_batches=1 trainer.limit_test_batches=1", ends=False),
    "validated": Run("", ends=False, after="transformers"),
    "fashion": Run("model.layers=1 logger=csv", write=_write_images),
    "shards": Run(f"{_TINY} global_batch_size=8", write=_write_text),
    "nanogpt": Run("global_batch_size=8 logger=csv"),
    "nanogpt_files": Run(
        "model.layers=1 model.heads=2 model.width=16 model.context=16 model.vocab_size=300 logger=csv",
        write=_write_tokens,
    ),
}


def _of(thing: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(thing, name) for name in names]


def _callbacks(seen: Seen, kind: str, *names: str) -> list[Any]:
    """These attributes of each callback of a kind."""
    made = [one for one in seen.trainer.callbacks if any(base.__name__ == kind for base in type(one).__mro__)]
    return [_of(one, names) for one in made]


def _classes(seen: Seen, *names: str) -> list[str]:
    found = _of(seen.trainer, names)
    return [type(one[0] if isinstance(one, list) else one).__name__ for one in found]


def _rates(seen: Seen, *steps: int) -> list[float]:
    """Of the first group, at these steps."""
    (config,) = seen.trainer.lr_scheduler_configs
    (base, *_), (factor, *_) = config.scheduler.base_lrs, config.scheduler.lr_lambdas
    return [round(base * factor(step), 8) for step in steps]


def _samples(seen: Seen) -> list[int]:
    """Of a micro batch, and of a step."""
    return [len(seen.batch[0]), len(seen.batch[0]) * seen.trainer.accumulate_grad_batches]


LOOKS: dict[str, Callable[..., Any]] = {
    "trainer": lambda seen, *names: _of(seen.trainer, names),
    "model": lambda seen, *names: _of(seen.trainer.lightning_module.shape, names),
    "loader": lambda seen, *names: _of(seen.trainer.train_dataloader, names),
    "groups": lambda seen, *names: [
        [group[name] for name in names] for group in seen.trainer.optimizers[0].param_groups
    ],
    "callbacks": _callbacks,
    "classes": _classes,
    "schedule": lambda seen: type(seen.trainer.lr_scheduler_configs[0].scheduler).__name__,
    "rates": _rates,
    "samples": _samples,
    "gradient norm": lambda seen: round(seen.gradient_norm, 4),
    "dtype": lambda seen: str(seen.dtype),
    "device": lambda seen: seen.batch[0].device.type,
    "seed": lambda seen: os.environ["PL_GLOBAL_SEED"],
    "torch": lambda seen, name: getattr(torch, name)(),
    "files": lambda seen: {split: path.as_posix() for split, path in seen.trainer.datamodule.files.items()},
    "targets are the next tokens": lambda seen: bool((seen.batch[1] == (seen.batch[0] + 1) % 300).all()),
    "first characters": lambda seen: seen.trainer.datamodule.decode(seen.batch[0][0, :3].tolist()),
    "tokens of a sample": lambda seen: seen.batch[0].shape[1],
    "mean of the embedding": lambda seen: round(seen.trainer.lightning_module.tokens.weight.mean().item(), 2),
}
LEFT: dict[str, Callable[..., Any]] = {
    "logged steps": lambda run: len(run.column("train/loss")),
    "name": lambda run: run.run_dir.parent.name,
    "run directory": lambda run: str(run.run_dir.relative_to(run.folder)),
    "tells": lambda run, text: text in run.out,
}


def command(run: str) -> list[str]:
    """What a run types: its own words and those of its rows, of which no two are of one key."""
    asked = _asked(run)
    keys = [word.partition("=")[0] for word in asked]
    assert len(keys) == len(set(keys)), f"{run}: two rows need runs of their own: {asked}"
    return [*asked, f"callbacks.effects._target_={__name__}.Effects", f"callbacks.effects.run={run}"]


def _asked(run: str) -> list[str]:
    before = RUNS[run].after
    asked = [*(_asked(before) if before else ()), *RUNS[run].typed.split()]
    for there, row in _rows_of(run):
        asked += row["typed"].split() if "typed" in row else [word for span in spans(HERE[there]) for word in span]
    return list(dict.fromkeys(asked))


def _rows_of(run: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((there, row) for there, all_of_row in ROWS.items() for row in all_of_row if row["run"] == run)


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
        looks = [row["look"] for _, row in _rows_of(self.run) if "look" in row]
        Path("effects.json").write_text(json.dumps([LOOKS[name](seen, *words) for name, *words in looks]))
        self.written = True
        if RUNS[self.run].ends:
            os._exit(0)
        trainer.should_stop = True

    def _note_dtype(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.dtype = output.dtype


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """The run of a name, which is started once."""
    folder = tmp_path_factory.mktemp("migrations")
    train = runs_in(folder)

    @cache
    def ran(name: str) -> Finished:
        before = RUNS[name].after
        own = ran(before).folder if before else folder / name
        own.mkdir(exist_ok=True)
        RUNS[name].write(own)
        return train(*command(name), folder=own)

    return ran


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_the_rows_of_a_run_have_their_effects(name: str, ran: Callable[[str], Finished]) -> None:
    run, found = ran(name), []
    effects = run.folder / "effects.json"
    seen = iter(json.loads(effects.read_text()) if RUNS[name].after is None else ())
    for there, row in _rows_of(name):
        value = next(seen) if "look" in row else LEFT[row["left"][0]](run, *row["left"][1:])
        found.append((there, value))
    assert found == [(there, row["found"]) for there, row in _rows_of(name)]
