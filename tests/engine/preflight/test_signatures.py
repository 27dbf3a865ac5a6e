"""Signatures read from source, with nothing imported."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightswitch.preflight.signatures import Signature, signature


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package with a name of its own, as what was read of a module is kept."""
    package = f"package_{abs(hash(request.node.name))}"
    (tmp_path / package).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / package / "parts.py").write_text(PARTS)
    (tmp_path / package / "__init__.py").write_text(
        "import imported_nowhere\nfrom .parts import Part\nfrom .parts import Sub as Renamed\n"
    )
    return package


PARTS = """
import torch_that_is_not_there
from typing import Literal, Optional, Sequence, Union

Mode = Literal["fast", "slow"]

class Part:
    def __init__(self, width: int, mode: Mode = "fast", rate: "float | None" = None, *, sizes: Sequence[int] = ()):
        ...

class Sub(Part):
    def other(self, nothing): ...

class Open(Part):
    def __init__(self, depth: Optional[int] = None, **kwargs): ...

class Passing(Part):
    def __init__(self, *, mode: str = "own", layer=1, **kwargs):
        self.layer = layer
        super().__init__(**kwargs)

SIZE = 16
AGAIN = AGAIN + 1

class Sized:
    def __init__(self, batch: int = SIZE, other=2 * SIZE - 1, endless=AGAIN, limit: int = None, made=make()): ...

class Explicit(Part):
    def __init__(self, heads=3, **kwargs):
        Part.__init__(self, **kwargs)

class Hiding:
    SIZE_OF_CLASS = 32
    def __init__(self, batch=SIZE_OF_CLASS, rebound=REBOUND): ...

SIZE_OF_CLASS = REBOUND = 8
if True:
    REBOUND = 4

from elsewhere import Same

class Same(Same): ...

class Around(Back): ...

class Back(Around): ...

class Odd(torch_that_is_not_there.Base): ...

def make(params, lr: Union[float, str] = 0.1, *, mode: Mode): ...

if True:
    class Conditional:
        def __init__(self, x: bool = False): ...
else:
    Conditional = None
    def elsewhere(y): ...

try:
    from faster import quick
except ImportError:
    def slow(z): ...

if VERSION:
    class Twice:
        def __init__(self, old): ...
else:
    class Twice:
        def __init__(self, new): ...

class Overloaded:
    @overload
    def __init__(self, width: int): ...
    @overload
    def __init__(self, width: int, depth: str): ...
    def __init__(self, width, depth=None, more=1): ...
    later: int

@define
class Made(Part):
    own: int

Tree = Union[int, "Tree"]
def grow(tree: Tree): ...

class Members(dict): ...

with open("nothing") as opened:
    import os.path as paths
    inner: type = int

class Kinds:
    class Inner:
        def __init__(self, depth: "a number of layers", sign: Literal[-1, 1] = 1): ...
    @classmethod
    def small(cls, width: int): ...
    @staticmethod
    def of(name): ...

class Derived(Kinds): ...
"""


def test_a_class_tells_its_parameters(source: str) -> None:
    found = _read(f"{source}.parts.Part")
    assert list(found.parameters) == ["width", "mode", "rate", "sizes"]
    assert found.required == {"width"}
    assert not found.open_ended


def test_annotations_tell_types_and_literals(source: str) -> None:
    parameters = _read(f"{source}.parts.Part").parameters
    assert (parameters["width"].kinds, parameters["width"].literals) == ({int}, set())
    assert (parameters["mode"].kinds, parameters["mode"].literals) == (set(), {"fast", "slow"})
    assert parameters["rate"].kinds == {float, type(None)}
    assert parameters["sizes"].kinds == {list}


def test_a_function_tells_its_parameters(source: str) -> None:
    found = _read(f"{source}.parts.make")
    assert list(found.parameters) == ["params", "lr", "mode"]
    assert found.required == {"params", "mode"}
    assert found.parameters["params"].kinds is None
    assert found.parameters["lr"].kinds == {float, str}


def test_a_subclass_inherits_its_constructor(source: str) -> None:
    assert _read(f"{source}.parts.Sub") == _read(f"{source}.parts.Part")


def test_keywords_of_any_name_are_open_ended(source: str) -> None:
    found = _read(f"{source}.parts.Open")
    assert found.open_ended
    assert list(found.parameters) == ["depth"]
    assert found.parameters["depth"].kinds == {int, type(None)}


def test_defaults_have_values_where_the_source_shows_them(source: str) -> None:
    parameters = _read(f"{source}.parts.Sized").parameters
    assert [parameter.value for parameter in parameters.values()] == [16, 31, None, None, None]
    assert [one.value for one in _read(f"{source}.parts.Hiding").parameters.values()] == [None, None]
    assert parameters["limit"].kinds == {int, type(None)}


def test_a_base_of_another_module_is_found_by_any_import(source: str, tmp_path: Path) -> None:
    (tmp_path / source / "more.py").write_text(
        f"import {source}\nimport {source}.parts\nimport {source}.parts as p\nfrom . import parts\n"
        f"class One({source}.parts.Sized): ...\nclass Two(p.Sized): ...\nclass Three(parts.Sized): ...\n"
        "class Four(unknown.Base, parts.Sized): ...\nclass Five(parts.Sized, unknown.Base): ...\n"
        "try:\n    from nowhere_at_all import Net\nexcept ImportError:\n    from .parts import Part as Net\n"
        "def make(size=p.SIZE): ...\n"
    )
    sized = _read(f"{source}.parts.Sized").parameters.keys()
    for name in ("One", "Two", "Three", "Five"):
        assert _read(f"{source}.more.{name}").parameters.keys() == sized, name
    assert signature(f"{source}.more.Four") is None  # the first base may have a constructor
    assert signature(f"{source}.more.Net") is None
    assert _read(f"{source}.more.make").parameters["size"].value == 16


def test_what_a_constructor_passes_on_is_taken_by_its_base(source: str) -> None:
    found = _read(f"{source}.parts.Passing")
    assert (list(found.parameters), found.required) == (["mode", "layer", "width", "rate", "sizes"], set())
    assert found.passed_on == {"width", "rate", "sizes"}
    assert found.parameters["mode"].default == "'own'"
    assert found.open_ended  # it may take others itself, as by kwargs.pop
    assert list(_read(f"{source}.parts.Explicit").parameters) == ["heads"]  # a base that is not the next in line
    assert signature(f"{source}.parts.Same") is None
    assert signature(f"{source}.parts.Back") is None


def test_a_package_hands_on_names_of_its_modules(source: str) -> None:
    assert _read(f"{source}.Part") == _read(f"{source}.parts.Part")
    assert _read(f"{source}.Renamed") == _read(f"{source}.parts.Part")


def test_folders_without_init_are_packages(source: str, tmp_path: Path) -> None:
    (tmp_path / source / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / source / "deep" / "deeper" / "part.py").write_text(PARTS)
    assert list(_read(f"{source}.deep.deeper.part.Part").parameters) == ["width", "mode", "rate", "sizes"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Conditional", ["x"]),
        ("elsewhere", ["y"]),
        ("slow", ["z"]),
        ("Kinds.Inner", ["depth", "sign"]),
        ("Kinds.small", ["width"]),
        ("Derived.small", ["width"]),
        ("Kinds.of", ["name"]),
        ("Overloaded", ["width", "depth", "more"]),
    ],
)
def test_what_a_statement_binds_is_found(source: str, name: str, parameters: list[str]) -> None:
    found = _read(f"{source}.parts.{name}")
    assert list(found.parameters) == parameters
    assert [found.parameters[one].literals for one in parameters if one == "sign"] in ([], [{-1, 1}])
    assert [found.parameters[one].kinds for one in parameters if one == "depth"] in ([], [None])


UNKNOWN = ("opened", "paths", "inner", "Odd.anything", "Twice", "Made", "Members.fromkeys", "paths.join")


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_bound_to_something_unknown_tells_nothing(source: str, name: str) -> None:
    assert signature(f"{source}.parts.{name}") is None


def test_a_name_that_code_may_bind_tells_nothing(source: str, tmp_path: Path) -> None:
    bound = "def _bind():\n    global Late\n    class Late: ...\n", "for each in 'xy':\n    globals()[each] = int\n"
    for module, text, name in zip(("late", "each"), bound, ("Late", "x"), strict=True):
        (tmp_path / source / f"{module}.py").write_text(text)
        assert signature(f"{source}.{module}.{name}") is None
    (tmp_path / source / "__init__.py").write_text("from . import late as other\n")
    assert signature(f"{source}.other.Late") is None


def test_a_type_that_contains_itself_allows_anything(source: str) -> None:
    assert _read(f"{source}.parts.grow").parameters["tree"].kinds is None


def test_a_file_is_read_as_python_reads_it(source: str, tmp_path: Path) -> None:
    (tmp_path / source / "latin.py").write_bytes("# coding: latin-1\ndef make(é): ...\n".encode("latin-1"))
    assert list(_read(f"{source}.latin.make").parameters) == ["é"]
    (tmp_path / source / "broken.py").write_text("def make(\n")
    with pytest.raises(
        LookupError, match=r"Python can't read \S+broken.py: '\(' was never closed \(broken.py, line 1\)"
    ):
        signature(f"{source}.broken.make")


def test_a_class_without_the_member_is_an_error(source: str) -> None:
    with pytest.raises(LookupError, match=rf"{source}\.parts\.Derived has no smal"):
        signature(f"{source}.parts.Derived.smal")


def test_a_base_that_cannot_be_read_tells_nothing(source: str) -> None:
    assert signature(f"{source}.parts.Odd") is None


def test_a_missing_name_is_an_error(source: str) -> None:
    with pytest.raises(LookupError, match=rf"{source}\.parts has no Prat"):
        signature(f"{source}.parts.Prat")


@pytest.mark.parametrize("module", ["parst", "parts.deeper"])
def test_a_missing_module_is_an_error(source: str, module: str) -> None:
    with pytest.raises(LookupError, match=rf"there is no module {source}\.{module}"):
        signature(f"{source}.{module}.Part")
    with pytest.raises(LookupError, match="there is no module nowhere_at_all"):
        signature("nowhere_at_all.Part")


def test_what_has_no_python_source_tells_nothing() -> None:
    for name in ("math.sqrt", "os.path.join", "pathlib.Path.joinpath", "math.nothing"):
        assert signature(name) is None


def test_a_name_from_a_star_import_tells_nothing() -> None:
    assert signature("torch.nn.Linear") is None
    assert signature("numpy.array") is None


REAL = {
    "lightning.pytorch.Trainer": (
        "max_steps",
        "limit_val_batches",
        "gradient_clip_algorithm",
        "use_distributed_sampler",
    ),
    "lightning.pytorch.callbacks.ModelCheckpoint": ("monitor", "save_last", "enable_version_counter"),
    "lightning.pytorch.loggers.TensorBoardLogger": ("save_dir", "default_hp_metric"),
    "lightning.pytorch.strategies.DDPStrategy": ("start_method", "process_group_backend"),
    "torch.optim.AdamW": ("params", "lr", "betas", "weight_decay"),
    "torch.optim.lr_scheduler.CosineAnnealingLR": ("optimizer", "T_max"),
}


@pytest.fixture(scope="module")
def read_elsewhere() -> dict[str, object]:
    """What a process reads of real classes, and what it imported to do so."""
    script = (
        "import json, sys\nfrom lightswitch.preflight.signatures import signature\n"
        f"found = {{target: sorted(signature(target).parameters) for target in {list(REAL)}}}\n"
        "assert signature('__main__.Net') is None\n"
        "heavy = sorted({'torch', 'lightning', 'numpy', 'torchmetrics'} & sys.modules.keys())\n"
        "print(json.dumps({'found': found, 'heavy': heavy}))"
    )
    return json.loads(subprocess.check_output([sys.executable, "-c", script]))


@pytest.mark.parametrize("target", REAL)
def test_real_classes_tell_the_parameters_that_python_sees(target: str, read_elsewhere: dict[str, dict]) -> None:
    found = read_elsewhere["found"][target]
    assert set(REAL[target]) <= set(found)
    module, _, name = target.rpartition(".")
    seen = inspect.signature(getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name)).parameters
    assert set(found) == {p.name for p in seen.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def test_nothing_is_imported_to_read_a_signature(read_elsewhere: dict[str, list]) -> None:
    assert read_elsewhere["heavy"] == []


def test_the_precisions_of_a_trainer_are_known() -> None:
    precision = _read("lightning.pytorch.Trainer").parameters["precision"]
    assert precision.literals is not None
    assert {"16-mixed", "bf16-true", 32} <= precision.literals


def _read(target: str) -> Signature:
    found = signature(target)
    assert found is not None
    return found
