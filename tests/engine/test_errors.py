"""The errors of the engine: as another process gets them, and as a terminal shows them."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys

import pytest

from lightswitch import errors
from lightswitch.errors import RefusedRequest
from tests.engine.conftest import CHECKOUT


def test_the_drawing_of_the_errors_has_them_all() -> None:
    own = [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, BaseException)]
    assert sorted(re.findall(r"─ (\w+)", errors.__doc__ or "")) == sorted(own)


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
