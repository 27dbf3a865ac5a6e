"""What is wrong with a request, told at once and before a process is started."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from lightswitch.preflight import root_keys
from lightswitch.preflight.targets import Signature, signature
from lightswitch.reference import choices
from tests.engine.config.mistaken import joined
from tests.engine.conftest import CHECKOUT, PLAIN, PLAIN_DATA, PLAIN_MODEL, Train
from tests.engine.requests import Request, composed, composing, problems
from tests.engine.tiny import LANGUAGE_MODEL, PICTURES, TEXT
from tests.night import at_night

Ask = Callable[..., Request]
TABLE = yaml.safe_load(Path(__file__).with_name("requests.yaml").read_text())
ALONE = TABLE["alone"]


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


@pytest.mark.parametrize("what", ["keys", "arguments"])
def test_all_problems_are_told_at_once(what: str, ask: Ask) -> None:
    lines = {tuple(shlex.split(typed)): line for typed, line in TABLE[what].items()}
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


def test_what_a_mode_reads_and_an_older_config_lacks_is_refused_in_a_line(ask: Ask) -> None:
    request = ask(*PLAIN, "mode=check", "~check.steps")
    assert problems(request) == {f"check.steps: {LACKING}"}
    del request.cfg.check
    assert problems(request) == {f"check: {LACKING}"}


@pytest.mark.parametrize("typed", TABLE["starts"])
def test_what_is_refused_as_it_starts_is_a_line_and_leaves_nothing(typed: str, train: Train, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "runs/mlp/done/checkpoints/last.ckpt").mkdir(parents=True)
    files = {"README.md": "text", "odd.safetensors": "text", "constructors.py": CONSTRUCTORS}
    files["lacking.py"] = "import torchvison\nclass Model: pass\n"
    files["built.py"] = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused = train(*words(typed), folder=tmp_path, check=False)
    assert refused.err.startswith(f"error: {TABLE['starts'][typed]}")
    assert (refused.returncode, refused.err.count("\n")) == (2, 1)
    assert refused.out or [*tmp_path.glob("runs/plainmodel/*")] == []  # of what has not begun, nothing is left


CONSTRUCTORS = """
from tests.engine.plain import PlainModel

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


# What is typed and read by nobody is refused by name: each key of --help, against each model and dataset


CONF = CHECKOUT / "conf"
PARTIAL = ("model._target_=tests.engine.plain.PartialModel", PLAIN_DATA, "model.optimizer=${optimizer}")
GIVEN = ("optimizer", "scheduler")
ELSEWHERE = ("dry_run", "check", "lr_scaling.reference_batch_size")  # of another mode, or of a rule that is none
COMBINATIONS = {  # the words, and the groups that nobody reads there; those of conf: tests/project/test_choices.py
    "a module that takes both": ((*LANGUAGE_MODEL, TEXT), set[str]()),
    "a module with its own optimizer": (PLAIN, {*GIVEN}),
    "a module that takes an optimizer": (PARTIAL, {"scheduler"}),
    "a rate that refers to one": ((*PLAIN, "model.lr=${optimizer.lr}"), {"optimizer but lr", "scheduler"}),
}


@pytest.fixture
def _conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with composing():
        yield


def _keys() -> list[str]:
    """Those that --help lists: of the config, and of the choices that it begins with."""
    root, groups = choices.config(CONF), choices.groups(CONF)
    chosen = [one for group, name in root.defaults.items() for one in groups.get(group, ()) if one.name == name]
    return [key.path for choice in (root, *chosen) for key in choice.keys if not key.is_node and key.path[0] != "_"]


@pytest.mark.usefixtures("_conf")
@pytest.mark.parametrize("combination", ["a rate that refers to one", *at_night(*list(COMBINATIONS)[:-1])])
def test_each_key_of_help_is_read_or_told(combination: str, tmp_path: Path) -> None:
    words, groups = COMBINATIONS[combination]
    keys = [key for key in _keys() if not key.startswith("model.")]  # another's are its signature's
    expected = {key for key in keys if f"{key}.".startswith(tuple(f"{one}." for one in (*groups, *ELSEWHERE)))}
    if "optimizer but lr" in groups:
        expected |= {key for key in keys if key.startswith("optimizer.") and key != "optimizer.lr"}
    assert {*root_keys.unread(composed(*words, into=tmp_path).cfg, keys)} == expected


EXPERIMENTS = {  # the lines of a file, and what its refusals begin with
    "# @package _global_\noptimizer: {lr: 1, betas: [0.9, 0.9]}\nseed: 7": [
        "optimizer.lr of experiment=mine, optimizer.betas of experiment=mine: ",
    ],
    "seed: 7": [
        "experiment: the keys of its file are set below experiment; begin the file with # @package _global_",
    ],
}


@pytest.mark.usefixtures("_conf")
@pytest.mark.parametrize("text", EXPERIMENTS)
def test_what_stands_in_an_experiment_is_told_with_its_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(text)
    request = composed(*PLAIN, "experiment=mine", f"hydra.searchpath=[{tmp_path}]", into=tmp_path)
    told = [*root_keys.unread_problems(request.cfg, request.hydra)]
    assert [line[: len(text)] for line, text in zip(told, EXPERIMENTS[text], strict=True)] == EXPERIMENTS[text]


# Signatures of imported code


Mode = Literal["fast", "slow"]


class Part:
    """Its sizes.

    Args:
        width: of the part.
    """

    def __init__(
        self, width: int, mode: Mode = "fast", rate: float | None = None, *, sizes: Sequence[int] = ()
    ) -> None: ...

    class Inner:
        def __init__(self, depth: "a number of layers", sign: Literal[-1, 1] = 1) -> None: ...  # type: ignore  # noqa

    @classmethod
    def small(cls, limit: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013  # as many write it


class Open(Part):
    def __init__(self, mode: str = "own", layer=1, **kwargs: Any) -> None:  # type: ignore[no-untyped-def]
        super().__init__(**kwargs)


@dataclass
class Made:
    table: dict[str, int]
    path: Path = Path()


SIGNATURES = {  # parameters with the types and values that they allow and their defaults; ** takes any other keyword
    "Part": [
        "width: int, required",
        "mode: 'fast' | 'slow' = 'fast'",
        "rate: NoneType | float = None",
        "sizes: list = ()",
    ],
    "Part.Inner": ["depth, required", "sign: -1 | 1 = 1"],
    "Part.small": ["limit: NoneType | int = None"],
    "Open": [
        "mode: str = 'own'",
        "layer = 1",
        "width: int, passed on",
        "rate: NoneType | float = None, passed on",
        "sizes: list = (), passed on",
        "**",
    ],
    "Made": ["table: dict, required", f"path = {Path()!r}"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_has_what_python_sees_and_what_a_base_may_get(name: str) -> None:
    found = signature(f"{__name__}.{name}")
    assert found is not None
    assert [*_shown(found)] == SIGNATURES[name]
    assert ("width: of the part." in "".join(found.docstrings)) == (name in ("Part", "Open"))


def _shown(found: Signature) -> Iterator[str]:
    for name, of in found.parameters.items():
        kinds = [*sorted(kind.__name__ for kind in of.kinds or ()), *sorted(map(repr, of.literals or ()))]
        default = "" if of.default is None else f" = {of.default}"
        is_ = ", required" * (name in found.required) + ", passed on" * (name in found.passed_on)
        yield (f"{name}: {' | '.join(kinds)}" if kinds else name) + default + is_
    yield from ["**"] * found.open_ended


ABSENT = {  # what is not there, and the error; none where an import fails, which the run then meets
    "tests.engine.plain.Prat": "tests.engine.plain has no Prat",
    "tests.engine.plain.PlainModel.smal": "type object 'PlainModel' has no attribute 'smal'",
    "tests.engine.plian.PlainModel": "there is no module tests.engine.plian",
    "tests.engine.plain.PlainModl.small": "tests.engine.plain has no PlainModl",
    "nowhere_at_all.Part": "there is no module nowhere_at_all",
    "broken.make": r"Python can't read \S+broken.py: '\(' was never closed \(broken.py, line 1\)",
    "lacking.make": "importing it fails: No module named 'torchvison'",
    "failing.make": None,
}


@pytest.mark.parametrize("target", ABSENT)
def test_what_is_not_there_is_an_error(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"broken": "def make(\n", "lacking": "import torchvison\n", "failing": "{}['key']\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match=ABSENT[target]) if ABSENT[target] else nullcontext():
        assert signature(target) is None


def test_the_precisions_of_a_trainer_are_known() -> None:
    found = signature("lightning.pytorch.Trainer")
    assert found is not None
    assert {"16-mixed", "bf16-true", 32} <= (found.parameters["precision"].literals or set())
