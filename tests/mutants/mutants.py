"""Mutants as the files beside this one list them, and how one is put into the code.

A mutant names no file: its text is found wherever the code has moved to, whatever its indentation there.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    name: str  # package/fault
    breaks: str  # the sentence that no longer holds
    found: str  # code, as it is
    replaced: str  # what stands there in the mutant
    caught_by: tuple[str, ...]  # tests that came with the mend, as pytest names them
    note: str = ""


@dataclass(frozen=True)
class Mutation:
    path: Path  # in the checkout
    text: str  # of the whole file


def listed(*names: str) -> list[Mutant]:
    """Return the mutants of these names or packages, or all."""
    mutants = [_mutant(path.stem, name, of) for path in sorted(HERE.glob("*.yaml")) for name, of in _read(path).items()]
    chosen = [mutant for mutant in mutants if not names or {mutant.name, mutant.name.split("/")[0]} & {*names}]
    if unknown := {*names} - {part for mutant in mutants for part in (mutant.name, mutant.name.split("/")[0])}:
        raise ValueError(f"no mutant and no package is named {', '.join(sorted(unknown))}: see tests/mutants/*.yaml")
    return chosen


def code_of(checkout: Path = CHECKOUT) -> dict[Path, str]:
    """Return the texts of the code that mutants change, by path in the checkout."""
    paths = [checkout / "train.py", *sorted(checkout.glob("src/**/*.py")), *sorted(checkout.glob("slurm/*.sh"))]
    return {path.relative_to(checkout): path.read_text() for path in paths}


def mutation(mutant: Mutant, code: Mapping[Path, str]) -> Mutation:
    """Return the file that a mutant changes, as it is with it.

    Raises:
        ValueError: its text is not found exactly once in the code.
    """
    lines = [re.escape(line.strip()) for line in mutant.found.strip().splitlines()]
    pattern = re.compile(r"[ \t]*\n[ \t]*".join(lines))
    first = mutant.found.strip().splitlines()[0].strip()
    texts = {path: text for path, text in code.items() if first in text}  # by far faster than the pattern
    places = [(path, match) for path, text in texts.items() for match in pattern.finditer(text)]
    if len(places) != 1:
        where = ", ".join(str(path) for path, _ in places) or "no file"
        raise ValueError(
            f"{mutant.name}: what it calls `found` stands in {where}, and should once; where the code has changed, "
            "write the fault as it would be there today; where it can't happen any more, remove the mutant"
        )
    ((path, match),) = places
    text = code[path]
    begin = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
    indentation = begin[: len(begin) - len(begin.lstrip())]
    replaced = textwrap.indent(textwrap.dedent(mutant.replaced).strip("\n"), indentation)[len(indentation) :]
    return Mutation(path, text[: match.start()] + replaced + text[match.end() :])


def _read(path: Path) -> dict[str, dict[str, object]]:
    return yaml.safe_load(path.read_text()) or {}


def _mutant(package: str, name: str, of: dict[str, object]) -> Mutant:
    caught_by = of.pop("caught_by")
    tests = tuple([caught_by] if isinstance(caught_by, str) else map(str, caught_by))  # type: ignore[call-overload]
    return Mutant(f"{package}/{name}", caught_by=tests, **{key: str(value) for key, value in of.items()})
