"""The arrows of the design point down only, read from the import statements."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from hydra.utils import get_object
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightswitch.config import aliases
from tests.engine.conftest import CHECKOUT, PLAIN

SOURCES = sorted((CHECKOUT / "src").rglob("*.py"))
CONF = sorted((CHECKOUT / "conf").rglob("*.yaml"))

# From the top down: a package imports those below it alone, and so does a file.
PACKAGES = (
    *(
        "fork",
        "doctor",
        "launch",
        "checking",
        "compare",
        "sweeps",
        "reference",
        "preflight",
        "planning",
        "loop",
        "failures",
        "runs",
        "export",
        "config",
    ),
    *("deepspeed", "strategies", "context", "cluster", "process", "checkpoints", "batches", "monitoring"),
    *("figures", "hooked_strategy", "mixins"),  # files beside the packages
    *("patches", "versions", "regular_files", "errors"),
)
UNDECLARED = ("torchao", "triton")  # of torch: the first has a build for each version, the second comes with CUDA's
LARGEST_SHARE = 1 / 6  # of the engine's lines, in one package
# Read before torch is imported: to answer a mistake, --help, or what a run would cost.
WITHOUT_TORCH = (
    "lightswitch",
    "lightswitch.export.__main__",
    "lightswitch.launch.entry",
    "lightswitch.launch.hydra_entry",
    "lightswitch.preflight.check",
    "lightswitch.preflight.root_keys",
    "lightswitch.runs.finished",
    "lightswitch.preflight.targets",
    "lightswitch.preflight.devices",
    "lightswitch.preflight.signatures",
    "lightswitch.preflight.sources",
    "lightswitch.config.hydra_errors",
    "lightswitch.cluster.placement",
    "lightswitch.runs.claim",
    "lightswitch.runs.saved",
    "lightswitch.runs.lock",
    "lightswitch.runs.log",
    "lightswitch.config.values",
    "lightswitch.config.overrides",
    "lightswitch.patches",
    "lightswitch.batches.plan",
    "lightswitch.deepspeed.config",
    "lightswitch.preflight.strategies",
    "lightswitch.figures",
    "lightswitch.regular_files",
    "lightswitch.compare.__main__",
    "lightswitch.fork.__main__",
)


def _module(path: Path) -> str:
    parts = path.relative_to(CHECKOUT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path, at_once: bool = False) -> Iterator[str]:
    """The full names of modules, wherever in the file they are imported, or at its top level alone."""
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    for node in _tree(path).body if at_once else ast.walk(_tree(path)):
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


def test_project_and_engine_know_nothing_of_each_other_nor_of_the_tests() -> None:
    roots = {"lightswitch", "project", "train", "tests", "benchmarks"}
    others = {path: {name.split(".")[0] for name in _imports(path)} & roots for path in SOURCES}
    assert {path: names for path, names in others.items() if names - {_module(path).split(".")[0]}} == {}


def _undeclared(paths: Iterable[Path], declared: set[str], at_once: bool) -> set[tuple[str, str]]:
    """Imports of packages that are not declared; of those alone that come with the file, and not in a function."""
    owners = packages_distributions()
    own = {"lightswitch", "project", *sys.stdlib_module_names, *UNDECLARED}
    names = {(path, name.partition(".")[0]) for path in paths for name in _imports(path, at_once)}
    return {
        (_module(path), name)
        for path, name in names
        if name not in own and declared.isdisjoint(map(canonicalize_name, owners.get(name, [name])))
    }


def test_every_import_is_declared_and_the_engine_comes_without_extras() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = [one for name, listed in project["optional-dependencies"].items() if name != "dev" for one in listed]
    core, optional = (
        {canonicalize_name(Requirement(one).name) for one in ones} for ones in (project["dependencies"], extras)
    )
    assert _undeclared(SOURCES, core | optional, at_once=False) == set()
    engine = (path for module, path in ENGINE.items() if _package(module) != "deepspeed")
    assert _undeclared(engine, core, at_once=True) == set()


def test_packages_import_what_is_below_them() -> None:
    rank = {module: PACKAGES.index(_package(module)) for module in ENGINE.keys() - {"lightswitch"}}
    imports = [(module, other) for module in rank for other in _engine_imports(module)]
    assert [pair for pair in imports if _package(pair[0]) != _package(pair[1]) and rank[pair[1]] < rank[pair[0]]] == []


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
            assert re.match(r"[^\n]{20,}[.:`](\n|$)", ast.get_docstring(_tree(path)) or ""), module


def test_the_entry_point_imports_only_what_happens_around_fit() -> None:
    tree = ast.parse((CHECKOUT / "train.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {_package(module) for module in modules if module.startswith("lightswitch")}
    assert packages <= {"context", "launch", "preflight", "runs"}
    assert not any(module.startswith("project") for module in modules)


# What an error may recommend: a choice that comes with the engine. What a fork replaces, it can't know.
RECOMMENDED = ("strategy", "precision", "callbacks", "logger", "cluster", "trainer", "optimizer", "scheduler", "debug")
RECOMMENDED += ("compile",)
REPLACED = ("model", "data", "experiment")
_CHOICE = re.compile(rf"(?<![\w.])({'|'.join((*RECOMMENDED, *REPLACED))})=\[?([a-z0-9_-]+(?:,[a-z0-9_-]+)*)(?![\w{{-])")
_ITEM = re.compile(r"~(callbacks|logger)\.(\w+)")


def test_the_engine_recommends_choices_that_are_there_and_reads_no_file_of_conf() -> None:
    for text in (text for path in ENGINE.values() for text in _strings(_tree(path))):
        assert not re.search(rf"\bconf/|\b({'|'.join((*RECOMMENDED, *REPLACED))})/\w+\.yaml", text), text
        for group, choice in _choices_in(text) if text not in aliases._WORDS.values() else ():  # others' words
            assert group in RECOMMENDED, text
            assert choice in CHOICES[group], text
        for group, item in _ITEM.findall(text):
            assert item in _items(group), text


def test_the_engines_recommendations_are_found() -> None:
    """What the test above reads: were it nothing, it would find nothing wrong."""
    found = {choice for path in ENGINE.values() for choice in _choices_in(" ".join(_strings(_tree(path))))}
    assert {("strategy", "ddp"), ("precision", "bf16-mixed"), ("callbacks", "default")} <= found
    assert list(_choices_in("type model=large callbacks=[default,grad_norm] or my.model=x")) == [
        ("model", "large"), ("callbacks", "default"), ("callbacks", "grad_norm")
    ]  # fmt: skip


CHOICES = {
    group: {path.stem for path in (CHECKOUT / "conf" / group).glob("*.yaml")} | {"null"}
    for group in (*RECOMMENDED, *REPLACED)
}


def _choices_in(text: str) -> Iterator[tuple[str, str]]:
    """Each `group=choice` of it, also those of a list."""
    for group, chosen in _CHOICE.findall(text):
        yield from ((group, choice) for choice in chosen.split(","))


def _items(group: str) -> set[str]:
    """The keys that the group's files put into the config."""
    return {
        key
        for path in (CHECKOUT / "conf" / group).glob("*.yaml")
        for key in re.findall(r"^(\w+):", path.read_text(), re.MULTILINE)
    }


# of this repository alone, whose README, forks and documents name the examples
ON_EXAMPLES = ("test_readme.py", "fork/", "tables/claims.py", "tables/guide.py")
ON_EXAMPLES += ("tables/pictures.py",)
ENGINES_TESTS = [
    path
    for path in sorted((CHECKOUT / "tests" / "engine").rglob("*.py"))
    if not str(path.relative_to(CHECKOUT / "tests" / "engine")).startswith(ON_EXAMPLES)
]


def test_the_engines_tests_need_nothing_that_a_fork_replaces() -> None:
    for path in ENGINES_TESTS:
        assert not re.search(r"^\s*(from|import) project\b|[\"'=]project\.\w", path.read_text(), re.MULTILINE), path
        for text in _strings(_tree(path)):
            named = {(group, choice) for group, choice in _choices_in(text) if group in REPLACED}
            assert not {(group, choice) for group, choice in named if choice in CHOICES[group]}, (path, text)


def _strings(tree: ast.Module) -> Iterator[str]:
    """All but docstrings; of one that is put together, the fields are {}."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            told.update(map(id, node.values))
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def test_what_runs_before_torch_imports_none() -> None:
    script = (
        f"import sys\nfor name in {WITHOUT_TORCH}:\n    __import__(name)\n"
        "print({'torch', 'lightning', 'deepspeed', 'numpy'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


# imported by a run that asks for them alone
TOOLS = ("planning", "compare", "doctor", "export", "fork", "reference", "sweeps", "checking")


def test_a_run_imports_the_core_alone(tmp_path: Path) -> None:
    words = [str(CHECKOUT / "train.py"), *PLAIN, "strategy=ddp", "trainer.devices=2", "trainer.max_steps=2"]
    script = (
        f"import runpy, sys\nsys.argv[:] = {words}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print(*(name for name in sys.modules if name.startswith('lightswitch.')))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"}
    told = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, env=environment, text=True)
    imported = told.splitlines()[-1].split()
    assert "lightswitch.strategies.ddp" in imported
    assert [name for name in imported if name.split(".")[1] in TOOLS] == []


def _targets() -> dict[str, str]:
    found = {}
    for path in CONF:
        for target in re.findall(r"^\s*_target_: (\S+)$", path.read_text(), re.MULTILINE):
            found[target] = str(path.relative_to(CHECKOUT))
    return found


def test_what_conf_names_is_there() -> None:
    for target, path in _targets().items():
        assert callable(get_object(target)), path


def test_an_installed_checkout_brings_the_engine_and_the_project_and_no_other_name() -> None:
    """A placeholder there, such as train.py, would be what `import train` finds in any folder, and end that process."""
    names = {path.name for path in (CHECKOUT / "src").iterdir() if path.suffix != ".egg-info"} - {"__pycache__"}
    assert names == {"lightswitch", "project"}


def test_a_choice_says_on_top_what_it_is() -> None:
    for path in CONF:
        lines = path.read_text().splitlines()
        if any(line.startswith("# @package") for line in lines):
            assert lines[0].startswith("# @package "), f"{path}: Hydra reads it from the first line alone"
            lines = lines[1:]
        assert re.match(r"# \S", lines[0]), path


PACKAGE = {"strategy": "trainer", "precision": "trainer", "experiment": "_global_", "debug": "_global_"}


def test_a_strategy_or_precision_sits_in_the_trainer() -> None:
    for path in CONF:
        if package := PACKAGE.get(path.parent.name):
            assert path.read_text().startswith(f"# @package {package}\n"), path
