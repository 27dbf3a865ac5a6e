"""The mutants fit the code and the tests of today; how they are tried."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutants import CHECKOUT, Mutant, listed, mutation
from tests.mutants.nearness import by_nearness

MUTANTS = listed()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_put_in_at_one_place(mutant: Mutant) -> None:
    change = mutation(mutant)
    assert change.text != (CHECKOUT / change.path).read_text()
    ast.parse(change.text)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_catch_it_are_there(mutant: Mutant) -> None:
    for test in mutant.caught_by:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}\(", (CHECKOUT / path).read_text(), re.MULTILINE), test


def test_a_mutant_is_found_whatever_its_indentation(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "src/moved.py").write_text("class A:\n    def f(self):\n        x = 1\n        return x  # one\n")
    mutant = Mutant("a/b", "It is one.", found="x = 1\nreturn x", replaced="if True:\n    return 2\nreturn 3", caught_by=())
    changed = mutation(mutant, tmp_path).text.splitlines()[2:]
    assert changed == ["        if True:", "            return 2", "        return 3  # one"]


def test_a_text_that_stands_nowhere_or_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = 1\nx = 1\n")
    for found, where in (("x = 1", "train.py, train.py"), ("x = 2", "no file")):
        with pytest.raises(ValueError, match=f"`found` stands once in {where}"):
            mutation(Mutant("a/b", "It is one.", found, "x = 3", ()), tmp_path)


def test_the_nearest_tests_are_those_that_import_a_module() -> None:
    order = by_nearness(CHECKOUT, Path("src/lightswitch/batches/order.py"))
    assert order[0].startswith("tests/engine/batches/")
    assert len(order) == len({*order}) == Counter(map(Path.exists, map(CHECKOUT.joinpath, order)))[True]
