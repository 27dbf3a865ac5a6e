"""What is wrong with a request, told at once and before a process is started."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from tests.engine.config.mistaken import joined
from tests.engine.conftest import PLAIN, PLAIN_DATA, PLAIN_MODEL, Train
from tests.engine.requests import Request, composed, composing, problems
from tests.engine.tiny import PICTURES

Ask = Callable[..., Request]
TABLE = yaml.safe_load(Path(__file__).with_name("requests.yaml").read_text())
ALONE = TABLE["alone"] | {
    f"name={129 * 'x'}": "name has 129 characters, and 128 are allowed; type name=NAME",
    f"trainer.gradient_clip_val={'9' * 400}": "trainer.gradient_clip_val: found a number of 400 digits; use one of at "
    "most 9223372036854775807",
}


def words(typed: str) -> list[str]:
    on_cpu = () if "accelerator" in typed else ("trainer.accelerator=cpu",)
    data = () if "~data" in typed else (PLAIN_DATA,)
    return [PLAIN_MODEL, *data, *on_cpu, *shlex.split(typed)]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    monkeypatch.chdir(tmp_path)
    with composing():
        yield lambda *typed: composed(*typed, into=tmp_path / "runs/plainmodel/mine")


@pytest.mark.parametrize("typed", ALONE, ids=lambda typed: typed[:120])
def test_a_request_that_cannot_be_met_is_refused_in_a_line(typed: str, ask: Ask) -> None:
    lines = [ALONE[typed]] if isinstance(ALONE[typed], str) else ALONE[typed]
    assert problems(ask(*words(typed))) == set(lines)


def test_all_problems_are_told_at_once(ask: Ask) -> None:
    lines = {tuple(shlex.split(typed)): line for typed, line in TABLE["together"].items()}
    for several in joined(lines):
        expected = {line for typed, line in lines.items() if {*typed} <= {*several}}
        assert problems(ask(*words(""), *several)) == expected


REMOVED = None
LACKING = "the config has no such key, and the engine reads it; add it to config.yaml"
READ = ("seed", "mode", "objective", "resume", "meet_timeout_seconds", "global_batch_size", "lr_scaling", "watch")
READ += ("lr_scaling.rule", "watch.lost_after_seconds", "trainer.devices", "trainer.num_nodes", "init_from")
WRITTEN: dict[str, tuple[Any, str]] = {  # in a fork's files of conf, whose types are checked before what relies on them
    "callbacks": (["my"], "callbacks: found list, expected a name for each; type callbacks.NAME._target_=my.Class"),
    "trainer.strategy.bucket_cap_mb": ("25", "trainer.strategy.bucket_cap_mb=25: found str, expected float or null"),
    **{key: (REMOVED, f"{key}: {LACKING}") for key in (*READ, "ckpt_path", "micro_batch_size")},
}


@pytest.mark.parametrize("key", WRITTEN)
def test_what_a_config_says_of_another_type_or_lacks_is_refused_in_a_line(key: str, ask: Ask) -> None:
    value, line = WRITTEN[key]
    request = ask(*PLAIN, "trainer.accelerator=cpu", "strategy=ddp")
    if value is REMOVED:
        node, _, name = key.rpartition(".")
        (OmegaConf.select(request.cfg, node) if node else request.cfg).pop(name)
    else:
        OmegaConf.update(request.cfg, key, value, merge=False)
    assert problems(request) == {line}


@pytest.mark.parametrize("typed", TABLE["starts"])
def test_what_is_refused_as_it_starts_is_a_line_and_leaves_nothing(typed: str, train: Train, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "runs/mlp/done/checkpoints/last.ckpt").mkdir(parents=True)
    files = {"README.md": "text", "odd.safetensors": "text", "constructors.py": CONSTRUCTORS}
    files["lacking.py"] = "import torchvison\nclass Model: pass\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused = train(*words(typed), folder=tmp_path, check=False)
    assert refused.err.startswith(f"error: {TABLE['starts'][typed]}")
    assert (refused.returncode, refused.err.count("\n")) == (2, 1)
    assert refused.out or [*tmp_path.glob("runs/plainmodel/*")] == []  # of what has not begun, nothing is left


CONSTRUCTORS = """
from torch import nn
from tests.engine.plain import PlainModel

class Loose(PlainModel):
    def __init__(self, width=64, depth=None) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2)

class Lacking(PlainModel):
    def __init__(self) -> None:
        import torchvison
"""


@pytest.mark.gpu
def test_more_gpus_than_there_are_are_refused(train: Train) -> None:
    there, asked = torch.cuda.device_count(), torch.cuda.device_count() + 1
    refused = train(*PLAIN, f"trainer.devices={asked}", f"global_batch_size={asked}", check=False)
    assert refused.refusal.startswith(f"trainer.devices={asked}: this machine has {there} GPU")


class Own:
    def __init__(self, optimizer: object = "adam") -> None: ...


class TrainBatchData:
    def __init__(self, train_batch_size: int = 8) -> None: ...


SIZE = 4 * 3


class ByConstant:
    def __init__(self, batch_size: int = SIZE) -> None: ...


class Passing(ByConstant):
    def __init__(self, extra: int = 1, **kwargs: int) -> None:
        super().__init__(**kwargs)


class OtherData:
    def __init__(self, val_batch_size: int = 8) -> None: ...


BATCHES = {  # the global batch, by data and what is typed
    "TrainBatchData data.train_batch_size=16": 16,
    "TrainBatchData": 8,
    "TrainBatchData data.train_batch_size=16 global_batch_size=32": 32,
    "OtherData": 64,
    "ByConstant": 12,
    "Passing": 12,
    "Passing data.batch_size=20": 20,
    "TrainBatchData data.train_batch_size=${global_batch_size}": 64,
    "TrainBatchData data.sharded_by=dataset": 64,
}


@pytest.mark.parametrize("typed", BATCHES)
def test_a_batch_size_of_the_datas_own_is_the_global_one_where_none_is_typed(typed: str, ask: Ask) -> None:
    data = f"data._target_={__name__}.{typed}"
    assert ask(PLAIN[0], *data.split()).cfg.global_batch_size == BATCHES[typed]


def test_gradients_are_clipped_where_that_is_typed_alone(ask: Ask) -> None:
    assert "gradient_clip_val" not in ask(*PLAIN).cfg.trainer
    assert ask(PLAIN[0], PICTURES, "trainer=clipped").cfg.trainer.gradient_clip_val == 1.0
