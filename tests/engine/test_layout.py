"""The house rules of the engine's code, read from its sources: arrows that point down, budgets, no state, no torch."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

from hydra.utils import get_object
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightswitch.config import aliases
from tests.engine.conftest import CHECKOUT

SOURCES = sorted((CHECKOUT / "src").rglob("*.py"))
CONF = sorted((CHECKOUT / "conf").rglob("*.yaml"))

# From the top down: a package, or a file beside the packages, imports those below it alone. Each has the lines of code
# that it may have: lower the number when it shrinks, and before you raise one, look for what can go instead.
BUDGETS = {
    **{"fork": 185, "doctor": 200, "launch": 1243, "checking": 505, "compare": 330, "sweeps": 355, "reference": 255},
    **{"preflight": 941, "planning": 1731, "loop": 400, "failures": 894, "runs": 683, "export": 345, "config": 583},
    **{"deepspeed": 768, "strategies": 1528, "context": 20, "cluster": 372, "process": 212, "checkpoints": 1707},
    **{"batches": 1686, "monitoring": 911, "hooked_strategy": 168, "collectives": 32},
    **{"patches": 245, "regular_files": 100, "errors": 105},
}
PACKAGES = tuple(BUDGETS)
# They need what a run is built from, which is in launch, and count as the tool that they are the upper half of.
OF_TOOLS = dict.fromkeys(("launch.plan", "launch.dry_run", "launch.fitting", "launch.auto"), "planning")
TOOLS = ("planning", "compare", "doctor", "export", "fork", "reference", "sweeps", "checking")  # a run asks for them
UNDECLARED = ("triton",)  # it comes with torch for CUDA
# Read before torch is imported: to answer a mistake, --help, or what a run would cost.
WITHOUT_TORCH = """
    export.__main__ launch.entry launch.hydra_entry preflight.check preflight.root_keys preflight.targets
    preflight.devices preflight.strategies runs.resume runs.claim
    runs.log config.hydra_errors config.overrides cluster.placement batches.plan
    deepspeed.config compare.__main__ fork patches regular_files
"""


def module_of(path: Path) -> str:
    parts = path.relative_to(CHECKOUT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imports(path: Path, at_once: bool = False) -> Iterator[str]:
    """The full names of modules, wherever in the file they are imported, or at its top level alone."""
    for node in tree(path).body if at_once else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


ENGINE = {module_of(path): path for path in SOURCES if module_of(path).startswith("lightswitch")}


def package_of(module: str) -> str:
    return (*module.split("."), "")[1]


@cache
def engine_imports(module: str) -> set[str]:
    """Other files of the engine; `from package import name` means the file of that name, where there is one."""
    found = set()
    for name in imports(ENGINE[module]):
        while name.startswith("lightswitch") and name not in ENGINE:
            name = name.rpartition(".")[0]
        found.add(name)
    return (found & ENGINE.keys()) - {module}


def code_lines(path: Path) -> int:
    """Return a file's lines of code: none that is blank, a comment or a docstring."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    lines = {n for one in tokens if one.type not in skipped for n in range(one.start[0], one.end[0] + 1)}
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def budget_of(module: str) -> str:
    """Return the package, or the file, in whose budget a file counts."""
    return OF_TOOLS.get(module.partition(".")[2], package_of(module))


def test_packages_import_what_is_below_them_and_nothing_of_the_project_or_the_tests() -> None:
    rank = {module: PACKAGES.index(package_of(module)) for module in ENGINE.keys() - {"lightswitch"}}
    pairs = [(module, other) for module in rank for other in engine_imports(module)]
    up = [(one, other) for one, other in pairs if package_of(one) != package_of(other) and rank[other] < rank[one]]
    assert up == []
    roots = {"lightswitch", "project", "train", "tests", "benchmarks"}
    others = {path: {name.split(".")[0] for name in imports(path)} & roots for path in SOURCES}
    assert {path: names for path, names in others.items() if names - {module_of(path).split(".")[0]}} == {}


def test_what_each_benchmark_imports_is_there() -> None:
    """mypy does not read them, and only the night runs them."""
    for path in (CHECKOUT / "benchmarks").glob("*.py"):
        import_module(f"benchmarks.{path.stem}")


def test_no_file_imports_another_that_imports_it() -> None:
    below = {module: engine_imports(module) for module in ENGINE}
    while leaves := {module for module, others in below.items() if not others & below.keys()}:
        below = {module: others for module, others in below.items() if module not in leaves}
    assert not below, f"in a circle, or above one: {sorted(below)}"


def test_no_package_has_more_lines_than_its_budget() -> None:
    lines = dict.fromkeys(("", *PACKAGES), 0)
    for module, path in ENGINE.items():
        lines[budget_of(module)] += code_lines(path)
    assert {name: (count, BUDGETS.get(name, 0)) for name, count in lines.items() if count > BUDGETS.get(name, 50)} == {}


def _undeclared(paths: Iterable[Path], declared: set[str], at_once: bool) -> set[tuple[str, str]]:
    """Imports of packages that are not declared; of those alone that come with the file, and not in a function."""
    owners = packages_distributions()
    own = {"lightswitch", "project", *sys.stdlib_module_names, *UNDECLARED}
    names = {(path, name.partition(".")[0]) for path in paths for name in imports(path, at_once)}
    return {
        (module_of(path), name)
        for path, name in names
        if name not in own and declared.isdisjoint(map(canonicalize_name, owners.get(name, [name])))
    }


def test_every_import_is_declared_and_the_engine_comes_without_extras() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = [one for listed in project["optional-dependencies"].values() for one in listed]
    core, optional = (
        {canonicalize_name(Requirement(one).name) for one in ones} for ones in (project["dependencies"], extras)
    )
    assert _undeclared(SOURCES, core | optional, at_once=False) == set()
    engine = (path for module, path in ENGINE.items() if package_of(module) != "deepspeed")
    assert _undeclared(engine, core, at_once=True) == set()


def test_what_runs_before_torch_imports_none() -> None:
    script = "import sys\nfor name in sys.argv[1:]:\n    __import__(f'lightswitch.{name}')\n"
    script += "print({'torch', 'lightning', 'deepspeed', 'numpy'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", script, *WITHOUT_TORCH.split()], text=True) == "set()\n"


SLOW = {"matplotlib", "pandas", "scipy", "sklearn", "torchvision", "transformers"}
ASKED = "import torchmetrics as tm; from torchmetrics import Accuracy; from torchmetrics.text import BLEUScore; "
ASKED += "assert tm.classification.Accuracy is Accuracy and issubclass(BLEUScore, tm.Metric) and tm.__version__; "
ASKED += "plots = sys.modules['torchmetrics.utilities.plot']; assert '__getattr__' in vars(plots), 'not loaded yet'; "
ASKED += "assert plots._get_col_row_split(4) == (2, 2) and '__getattr__' not in vars(plots)"


def test_a_run_imports_the_core_alone(tmp_path: Path) -> None:
    words = [str(CHECKOUT / "train.py"), "strategy=ddp", "trainer.devices=1", "trainer.max_steps=1"]
    words += ["trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.accelerator=cpu"]
    script = "import runpy, sys\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    script += f"print(*(name for name in sys.modules if name.startswith('lightswitch.') or name in {SLOW}))\n{ASKED}"
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"}
    said = subprocess.check_output(["python", "-c", script, *words], cwd=tmp_path, env=environment, text=True)
    imported = said.splitlines()[-1].split()
    assert "lightswitch.strategies.ddp" in imported
    assert [name for name in imported if name in SLOW or package_of(name) in TOOLS] == []


CHANGING = "append extend add update pop popitem clear remove discard insert setdefault set put push enter_context"


def test_no_variable_of_a_module_changes_after_import() -> None:
    """ruff's PLW0603 forbids `global`. One that is cached so that it speaks once is such a variable, too."""
    for module, path in ENGINE.items():
        assigned = [one for one in tree(path).body if isinstance(one, ast.Assign | ast.AnnAssign)]
        names = {ast.unparse(to) for one in assigned for to in getattr(one, "targets", [getattr(one, "target", one)])}
        functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        changed = {name for one in functions for node in ast.walk(one) for name in _changed_by(node)}
        assert not changed & names, module
        for one in functions:
            if isinstance(one, ast.FunctionDef) and any("cache" in ast.unparse(mark) for mark in one.decorator_list):
                assert one.returns and ast.unparse(one.returns) != "None", f"{module}.{one.name}"  # noqa: PT018


def _changed_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING.split():
        yield ast.unparse(node.func.value)
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield ast.unparse(node.value)


def test_no_part_reads_what_another_prints() -> None:
    """What other people's programs print is read by `capture_output`; a notebook is told the line of its command."""
    readers = [module for module, path in ENGINE.items() if "subprocess.PIPE" in path.read_text()]
    assert readers == ["lightswitch.launch.from_python"]


# What an error may recommend: a choice that comes with the engine. What a fork replaces, it can't know.
RECOMMENDED = ("strategy", "precision", "callbacks", "logger", "cluster", "trainer", "optimizer", "scheduler", "debug")
RECOMMENDED += ("compile",)
_GROUP = rf"{'|'.join(RECOMMENDED)}|model|data|experiment"
_CHOICE = re.compile(rf"(?<![\w.])({_GROUP})=\[?([a-z0-9_-]+(?:,[a-z0-9_-]+)*)(?![\w{{-])")


def test_the_engine_recommends_choices_that_are_there_and_reads_no_file_of_conf() -> None:
    """Also those of a list, `callbacks=[default,grad_norm]`, and what may be left out, `~logger.csv`."""
    choices = {group: {*_stems(group), "null"} for group in RECOMMENDED}
    found = set()
    for text in (text for path in ENGINE.values() for text in _strings(path)):
        assert not re.search(rf"\bconf/|\b({_GROUP})/\w+\.yaml", text), text
        for group, listed in _CHOICE.findall(text) if text not in aliases._WORDS.values() else ():  # others' words
            assert {*listed.split(",")} <= choices.get(group, set()), text
            found.add(group)
        for group, item in re.findall(r"~(callbacks|logger)\.(\w+)", text):
            files = (CHECKOUT / "conf" / group).glob("*.yaml")
            assert any(re.search(f"^{item}:", path.read_text(), re.MULTILINE) for path in files), text
    assert {"strategy", "precision", "callbacks"} <= found


def _stems(group: str) -> set[str]:
    return {path.stem for path in (CHECKOUT / "conf" / group).glob("*.yaml")}


def _strings(path: Path) -> Iterator[str]:
    """All but docstrings; of one that is put together, the fields are {}."""
    skipped = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def test_a_choice_says_on_top_what_it_is_and_names_what_is_there() -> None:
    for path in CONF:
        text = path.read_text()
        assert re.match(r"(# @package .*\n)?# (?!@)\S", text), f"{path}: Hydra reads its package from line 1 alone"
        for target in re.findall(r"^\s*_target_: (\S+)$", text, re.MULTILINE):
            assert callable(get_object(target)), path
