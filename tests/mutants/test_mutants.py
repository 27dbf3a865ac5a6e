"""The mutants fit the code and the tests of today; how they are tried."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.mutants.mutants import CHECKOUT, Mutant, code_of, listed, mutation

MUTANTS, CODE = listed(), code_of()


def test_there_are_more_than_a_hundred() -> None:
    assert len(MUTANTS) > 100


def test_a_mutant_is_put_in_at_one_place() -> None:
    for mutant in MUTANTS:
        change = mutation(mutant, CODE)
        assert change.text != CODE[change.path], mutant.name
        if change.path.suffix == ".py":
            ast.parse(change.text, mutant.name)
        elif change.path.suffix == ".yaml":
            yaml.safe_load(change.text)
        elif change.path.suffix == ".sh":
            subprocess.run(["bash", "-n"], input=change.text, text=True, check=True)


def test_the_tests_that_came_with_its_mend_are_there() -> None:
    for test in (test for mutant in MUTANTS for test in mutant.caught_by):
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}\(", (CHECKOUT / path).read_text(), re.MULTILINE), test


def test_every_test_file_is_named_by_a_mutant_that_it_catches() -> None:
    """A file of tests for a GPU by what it has for CPUs: where there is none, a test that needs it catches nothing."""
    named = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.caught_by}
    assert {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "tests").rglob("test_*.py")} - named == set()


def test_a_mutant_is_found_whatever_its_indentation() -> None:
    code = {Path("moved.py"): "class A:\n    def f(self):\n        x = 1\n        return x  # one\n"}
    mutant = Mutant("a/b", "It is one.", "x = 1\nreturn x", "if True:\n    return 2\nreturn 3", caught_by=())
    changed = mutation(mutant, code).text.splitlines()[2:]
    assert changed == ["        if True:", "            return 2", "        return 3  # one"]


def test_a_text_that_stands_nowhere_or_twice_is_refused() -> None:
    for found, where in (("x = 1", "train.py, train.py"), ("x = 2", "no file")):
        with pytest.raises(ValueError, match=f"`found` stands in {where}, and should once"):
            mutation(Mutant("a/b", "It is one.", found, "x = 3", ()), {Path("train.py"): "x = 1\nx = 1\n"})
