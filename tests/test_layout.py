"""DESIGN: arrows point down only, and conf ties the project to the engine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from lightswitch.launch.signatures import signature
from tests.conftest import CHECKOUT

ENGINE = sorted((CHECKOUT / "src" / "lightswitch").rglob("*.py"))
PROJECT = sorted((CHECKOUT / "src" / "project").rglob("*.py"))
CONF = sorted((CHECKOUT / "conf").rglob("*.yaml"))
BELOW = {  # what each part of the engine may import
    "launch": {"launch", "planning", "strategies", "checkpoints", "batches", "monitoring"},
    "strategies": {"strategies", "checkpoints", "batches"},
    "checkpoints": {"checkpoints", "batches"},
    "batches": {"batches"},
    "monitoring": {"monitoring"},
}
BEFORE_TORCH = ("launch/entry", "launch/arguments", "launch/preflight", "launch/nodes", "launch/signatures",
                "launch/mistakes", "launch/placement", "launch/run_id", "launch/resolvers", "batches/plan")  # fmt: skip


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.stem)
def test_the_engine_imports_what_lies_below_and_nothing_of_the_project(path: Path) -> None:
    part = path.relative_to(CHECKOUT / "src" / "lightswitch").parts[0]
    for name in imports(path):
        assert not name.startswith("project"), name
        if name.startswith("lightswitch.") and part in BELOW:
            assert name.split(".")[1] in BELOW[part], name


@pytest.mark.parametrize("path", PROJECT, ids=lambda path: path.stem)
def test_the_project_imports_nothing_of_the_engine(path: Path) -> None:
    assert not [name for name in imports(path) if name.startswith(("lightswitch", "train"))]


@pytest.mark.parametrize("name", BEFORE_TORCH)
def test_what_runs_before_torch_is_imported_imports_none_of_it(name: str) -> None:
    heavy = ("torch", "lightning", "deepspeed", "numpy")
    path = CHECKOUT / "src" / "lightswitch" / f"{name}.py"
    assert not [found for found in imports(path, top_level_only=True) if found.split(".")[0] in heavy]


@pytest.mark.parametrize("path", CONF, ids=lambda path: str(path.relative_to(CHECKOUT / "conf")))
def test_a_config_says_what_it_is_for_and_names_code_that_is_there(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert lines[1 if lines[0].startswith("# @package ") else 0].startswith("# ")
    assert "# @package" not in "\n".join(lines[1:])  # Hydra reads it in the first line alone
    for target in targets(yaml.safe_load(text)):
        signature(target)  # raises LookupError


def targets(node: object) -> list[str]:
    if isinstance(node, list):
        return [target for item in node for target in targets(item)]
    if not isinstance(node, dict):
        return []
    own = [node["_target_"]] if "_target_" in node else []
    return own + [target for value in node.values() for target in targets(value)]
