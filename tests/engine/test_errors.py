"""One hierarchy of what the engine raises, and one table of exit codes: errors.py, read from the source."""

from __future__ import annotations

import ast
import builtins
import os
import pickle
import re
import subprocess
import sys

import pytest

from lightswitch.errors import RefusedRequest
from tests.engine.conftest import CHECKOUT
from tests.engine.test_layout import ENGINE, _package, _tree


def _exceptions() -> dict[str, tuple[str, list[str]]]:
    """Module and bases of each exception class of the engine, by its name."""
    classes = {
        node.name: (module, [ast.unparse(base) for base in node.bases])
        for module, path in ENGINE.items()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
    }

    def is_exception(name: str) -> bool:
        built_in = getattr(builtins, name, None)
        if name in classes:
            return any(map(is_exception, classes[name][1]))
        return isinstance(built_in, type) and issubclass(built_in, BaseException)

    return {name: found for name, found in classes.items() if is_exception(name)}


def test_an_exception_that_packages_share_is_in_errors() -> None:
    private = {name: module for name, (module, _) in _exceptions().items() if module != "lightswitch.errors"}
    assert "Damaged" in private
    for module, path in ENGINE.items():
        names = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Name | ast.Attribute)]
        for name in {node.id if isinstance(node, ast.Name) else node.attr for node in names} & private.keys():
            assert _package(private[name]) == _package(module), f"{module} uses {name} of {private[name]}"


def test_the_drawing_of_the_errors_is_what_the_classes_are() -> None:
    """A class hangs below the first of its bases; another one stands in brackets."""
    drawing = ast.get_docstring(_tree(ENGINE["lightswitch.errors"])) or ""
    above: dict[int, str] = {}
    drawn: dict[str, str] = {}
    for branch, name in re.findall(r"^ {4}([│├└─ ]*)(\w+)", drawing, re.MULTILINE):
        above[len(branch)] = name
        if branch:
            drawn[name] = above[len(branch) - 4]
    own = {name: bases for name, (module, bases) in _exceptions().items() if module == "lightswitch.errors"}
    assert drawn.keys() == own.keys()
    for name, bases in own.items():
        line = next(line for line in drawing.splitlines() if re.search(rf"─ {name}\b", line))
        in_brackets = re.findall(r"\b(?:a|an) (\w+Error)\)", line)
        assert [*bases] == ([drawn[name], *in_brackets] if drawn[name] in own else in_brackets or [drawn[name]]), name


ENDS_A_PROCESS = ("SystemExit", "exit", "_exit", "leave_now", "Ended")


def test_a_process_ends_with_an_exit_code_by_its_name() -> None:
    others = [path for module, path in ENGINE.items() if module != "lightswitch.errors"]
    for node in (node for path in others for node in ast.walk(_tree(path))):
        if isinstance(node, ast.Call) and re.split(r"\W", ast.unparse(node.func))[-1] in ENDS_A_PROCESS:
            written = [value for word in node.args for value in ast.walk(word) if isinstance(value, ast.Constant)]
            assert int not in {type(value.value) for value in written}, f"{ast.unparse(node)}: take one of ExitCode"


def test_all_problems_of_a_request_come_back_from_another_process() -> None:
    there = pickle.loads(pickle.dumps(RefusedRequest(["no data", "no model"], "a traceback")))
    assert (str(there), there.problems, there.details) == ("no data\nno model", ["no data", "no model"], "a traceback")


ASKED = {  # a command beside train.py, and train.py's own line on a terminal
    "command": "from lightswitch.errors import Command\nCommand('x', '2 nodes × 3').parse_args(['--help'])",
    "train.py": """
import logging, sys
from lightswitch.launch.entry import entry
sys.argv[:] = ["train.py", "--version"]
def main(cfg, run): ...
try:
    entry("conf", "config")(main)()
except BaseException:
    pass
print("2 nodes × 3")
""",
}


@pytest.mark.parametrize("code", ASKED.values(), ids=ASKED)
def test_what_a_terminal_has_no_character_for_is_replaced(code: str) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONHASHSEED": "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, cwd=CHECKOUT)
    assert "2 nodes ? 3" in ran.stdout, ran.stderr
