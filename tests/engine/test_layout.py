"""The arrows of the design point down only, read from the import statements."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.utils import get_object

CHECKOUT = Path(__file__).parents[2]
SOURCES = sorted((CHECKOUT / "src").rglob("*.py"))
CONF = sorted((CHECKOUT / "conf").rglob("*.yaml"))

# From the top down: a package imports those below it alone, and so does a file.
PACKAGES = (
    *("fork", "doctor", "launch", "sweeps", "preflight", "planning", "fault_tolerance", "runs", "config"),
    *("export", "deepspeed", "strategies", "cluster", "checkpoints", "batches", "monitoring"),
    *("patches", "trees", "versions", "errors"),  # files beside the packages
)
LARGEST_SHARE = 1 / 6  # of the engine's lines, in one package
# Read before torch is imported: to answer a mistake, --help, or what a run would cost.
WITHOUT_TORCH = (
    "lightswitch",
    "lightswitch.export.__main__",
    "lightswitch.launch.entry",
    "lightswitch.preflight.check",
    "lightswitch.preflight.root_keys",
    "lightswitch.runs.finished",
    "lightswitch.preflight.targets",
    "lightswitch.preflight.devices",
    "lightswitch.preflight.launchers",
    "lightswitch.preflight.signatures",
    "lightswitch.config.hydra_errors",
    "lightswitch.cluster.placement",
    "lightswitch.runs.run_id",
    "lightswitch.runs.claim",
    "lightswitch.runs.changes",
    "lightswitch.runs.holder",
    "lightswitch.runs.lock",
    "lightswitch.runs.log",
    "lightswitch.config.names",
    "lightswitch.runs.saved",
    "lightswitch.config.overrides",
    "lightswitch.launch.resolvers",
    "lightswitch.patches",
    "lightswitch.batches.plan",
    "lightswitch.deepspeed.config",
    "lightswitch.deepspeed.config_keys",
    "lightswitch.deepspeed.ops",
    "lightswitch.preflight.strategies",
)


def _module(path: Path) -> str:
    parts = path.relative_to(CHECKOUT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    """The full names of modules, wherever in the file they are imported."""
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


ENGINE = {_module(path): path for path in SOURCES if _module(path).startswith("lightswitch")}


def _engine_imports(module: str) -> set[str]:
    """Other files of the engine; `from package import name` means the file of that name, where there is one."""
    found = set()
    for name in _imports(ENGINE[module]):
        while name.startswith("lightswitch") and name not in ENGINE:
            name = name.rpartition(".")[0]
        found.add(name)
    return (found & ENGINE.keys()) - {module}


def _package(module: str) -> str:
    return (*module.split("."), "")[1]


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_project_and_engine_know_nothing_of_each_other_nor_of_the_tests(path: Path) -> None:
    own = _module(path).split(".")[0]
    others = {name.split(".")[0] for name in _imports(path)} & {
        "lightswitch",
        "project",
        "train",
        "tests",
        "benchmarks",
    }
    assert others <= {own}


@pytest.mark.parametrize("module", [module for module in ENGINE if module != "lightswitch"])
def test_packages_import_what_is_below_them(module: str) -> None:
    own = PACKAGES.index(_package(module))
    for other in _engine_imports(module):
        if _package(other) != _package(module):
            assert PACKAGES.index(_package(other)) > own, f"{module} imports {other}"


def test_no_file_imports_another_that_imports_it() -> None:
    below = {module: _engine_imports(module) for module in ENGINE}
    while leaves := {module for module, others in below.items() if not others & below.keys()}:
        below = {module: others for module, others in below.items() if module not in leaves}
    assert not below, f"in a circle, or above one: {sorted(below)}"


def test_no_package_is_larger_than_a_sixth_of_the_engine() -> None:
    lines = Counter[str]()
    for module, path in ENGINE.items():
        lines[_package(module)] += len(path.read_text().splitlines())
    package, most = lines.most_common(1)[0]
    assert most < LARGEST_SHARE * lines.total(), package


def test_a_package_says_in_a_sentence_what_it_is_for() -> None:
    for module, path in ENGINE.items():
        if path.name == "__init__.py":
            assert re.match(r"[^\n]{20,}[.:`](\n|$)", ast.get_docstring(ast.parse(path.read_text())) or ""), module


def test_the_entry_point_imports_only_what_happens_around_fit() -> None:
    tree = ast.parse((CHECKOUT / "train.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {_package(module) for module in modules if module.startswith("lightswitch")}
    assert packages <= {"launch", "preflight", "runs"}
    assert not any(module.startswith("project") for module in modules)


@pytest.mark.parametrize("path", [p for p in SOURCES if _module(p).startswith("lightswitch.")], ids=_module)
def test_the_engine_names_no_file_of_conf(path: Path) -> None:
    files = [f"{path.parent.name}/{path.stem}" for path in CONF]
    for text in _strings(ast.parse(path.read_text())):
        assert not any(file in text for file in ["conf/", *files]), text


def _strings(tree: ast.Module) -> Iterator[str]:
    """All but docstrings."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def test_what_runs_before_torch_imports_none() -> None:
    script = (
        f"import sys\nfor name in {WITHOUT_TORCH}:\n    __import__(name)\n"
        "print({'torch', 'lightning', 'deepspeed', 'numpy'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def _targets() -> dict[str, str]:
    found = {}
    for path in CONF:
        for target in re.findall(r"^\s*_target_: (\S+)$", path.read_text(), re.MULTILINE):
            found[target] = str(path.relative_to(CHECKOUT))
    return found


@pytest.mark.parametrize("target", _targets())
def test_what_conf_names_is_there(target: str) -> None:
    assert callable(get_object(target))


@pytest.mark.parametrize("path", CONF, ids=lambda path: str(path.relative_to(CHECKOUT / "conf")))
def test_a_choice_says_on_top_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    if any(line.startswith("# @package") for line in lines):
        assert lines[0].startswith("# @package "), "Hydra reads it from the first line alone"
        lines = lines[1:]
    assert re.match(r"# \S", lines[0]), lines[0]


@pytest.mark.parametrize("path", CONF, ids=lambda path: str(path.relative_to(CHECKOUT / "conf")))
def test_a_strategy_or_precision_sits_in_the_trainer(path: Path) -> None:
    if path.parent.name in ("strategy", "precision"):
        assert path.read_text().startswith("# @package trainer\n")
    if path.parent.name in ("experiment", "debug"):
        assert path.read_text().startswith("# @package _global_\n")
