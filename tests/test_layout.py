"""The arrows of the design point down only, read from the import statements."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.utils import get_object

CHECKOUT = Path(__file__).parents[1]
SOURCES = sorted((CHECKOUT / "src").rglob("*.py"))
CONF = sorted((CHECKOUT / "conf").rglob("*.yaml"))

# What each part may import of the others. Monitoring stands beside the line and imports none of it.
BELOW = {
    "export": {"checkpoints", "monitoring"},
    "doctor": {"launch", "strategies"},
    "launch": {"runs", "planning", "strategies", "checkpoints", "batches", "monitoring"},
    "runs": set(),
    "planning": {"batches"},
    "strategies": {"checkpoints", "batches"},
    "checkpoints": {"batches"},
    "batches": set(),
    "monitoring": set(),
    "trees": set(),
}
# Read before torch is imported: to answer a mistake, --help, or what a run would cost.
WITHOUT_TORCH = (
    "lightswitch",
    "lightswitch.export",
    "lightswitch.launch.entry",
    "lightswitch.launch.preflight",
    "lightswitch.launch.checks.knobs",
    "lightswitch.launch.finished",
    "lightswitch.launch.checks.nodes",
    "lightswitch.launch.checks.devices",
    "lightswitch.launch.checks.launchers",
    "lightswitch.launch.checks.signatures",
    "lightswitch.launch.mistakes",
    "lightswitch.launch.placement",
    "lightswitch.launch.run_id",
    "lightswitch.launch.claim",
    "lightswitch.launch.changes",
    "lightswitch.runs.holder",
    "lightswitch.runs.lock",
    "lightswitch.runs.log",
    "lightswitch.runs.names",
    "lightswitch.runs.saved",
    "lightswitch.launch.arguments",
    "lightswitch.launch.resolvers",
    "lightswitch.batches.plan",
    "lightswitch.strategies.deepspeed_config",
    "lightswitch.strategies.deepspeed_keys",
    "lightswitch.strategies.deepspeed_ops",
    "lightswitch.strategies.limits",
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


@pytest.mark.parametrize("path", [p for p in SOURCES if len(_module(p).split(".")) > 1], ids=_module)
def test_imports_point_down(path: Path) -> None:
    own, *rest = _module(path).split(".")
    for name in _imports(path):
        top, *inner = name.split(".")
        if top not in ("lightswitch", "project", "train", "tests"):
            continue
        assert top == own, f"{_module(path)} imports {name}"
        if own == "lightswitch" and inner[0] != rest[0]:
            assert inner[0] in BELOW[rest[0]] | {"refused", "trees"}, f"{_module(path)} imports {name}"


def test_every_part_of_the_engine_has_its_place() -> None:
    parts = {path.name for path in (CHECKOUT / "src" / "lightswitch").iterdir() if (path / "__init__.py").exists()}
    assert parts <= BELOW.keys()


def test_the_entry_point_imports_only_what_happens_around_fit() -> None:
    tree = ast.parse((CHECKOUT / "train.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(module.startswith("lightswitch.launch") for module in modules if module.startswith("lightswitch"))
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
