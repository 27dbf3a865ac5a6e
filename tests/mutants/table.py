"""The table of which mutant is caught by what."""

from __future__ import annotations

from typing import Any

from tests.mutants.mutants import HERE, Mutant

TITLES = {
    "suite": "By the suite, the nearest tests first",
    "baseline": "By the tests that came with the mends",
}


def line(name: str, result: dict[str, Any]) -> str:
    """Return a mutant's line on the terminal."""
    return f"{name}: {_caught(result)}, {result['seconds']:.0f} s"


def write(results: dict[str, dict[str, Any]], mutants: list[Mutant]) -> None:
    """Write table.md."""
    lines = [
        "# Which mutant is caught by what",
        "",
        "Made by `python -m tests.mutants`; seconds are of a shared machine.",
    ]
    for kind, title in TITLES.items():
        of_kind = [(mutant, results[kind][mutant.name]) for mutant in mutants if mutant.name in results.get(kind, {})]
        if not of_kind:
            continue
        caught = sum(bool(result["caught_by"]) and result.get("passes", True) for _, result in of_kind)
        seconds = sum(result["seconds"] for _, result in of_kind)
        checked = sum("passes" in result for _, result in of_kind)
        lines += ["", f"## {title}", "", f"{caught} of {len(of_kind)} are caught, in {seconds / 60:.0f} minutes."]
        lines += [f"Of {checked} the test was then run without the mutant.", ""]
        lines += ["| mutant | the sentence it breaks | caught by | s |", "| --- | --- | --- | ---: |"]
        for mutant, result in of_kind:
            lines.append(f"| {mutant.name} | {mutant.breaks} | {_caught(result)} | {result['seconds']:.0f} |")
        if untried := [mutant.name for mutant in mutants if mutant.name not in results[kind]]:
            lines += ["", f"Not tried yet: {', '.join(untried)}."]
    (HERE / "table.md").write_text("\n".join(lines) + "\n")


def _caught(result: dict[str, Any]) -> str:
    if not result["caught_by"]:
        return f"**{result['why']}**"
    test = f"`{result['caught_by']}`".replace("|", "\\|")
    return test if result.get("passes", True) else f"{test}, **which always fails**"
