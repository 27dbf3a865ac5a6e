"""What GPUs did, from the results that `make gpu` has kept.

python -m tests.engine.tables.gpu               # fills measured/gpu.md from measured/gpu.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.engine.tables import documents
from tests.engine.tables.matrix import PRECISIONS

RESULTS = documents.MEASURED / "gpu.json"
NOTHING = "Nothing has been measured: no GPU was at hand so far. What this project says of GPUs rests on reading."

Cells = Mapping[str, Mapping[str, Any]]


def main() -> None:
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    documents.put("gpu", document(content))


def document(content: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page, given what is in the JSON file; that nothing was measured, if it is empty."""
    pieces: dict[str, Cells] = {name: _run(cells) for name, cells in content.get("pieces", {}).items()}
    if not any(pieces.values()):
        return [NOTHING]
    tables = {
        "tests": ("Tests that need a GPU", _tests),
        "matrix": ("Strategies and precisions", _matrix),
        "parity": ("The same losses as on one device", _parity),
        "resume": ("From each strategy to each other", _resume),
        "failures": ("Failures between ranks", _failures),
        "shared": ("Two ranks on one card, by NCCL", _shared),
        "memory": ("Memory, as planned and as measured", _memory),
        "benchmark": ("Speed", _speed),
        "compiled": ("Speed under torch.compile", _speed),
        "parts": ("A step by part", _parts),
    }
    lines = [_heading(content)]
    for name, (title, table) in tables.items():
        if cells := pieces.get(name):
            lines += ["", f"### {title}", "", *table(cells)]
    return [*lines, *_not_as_expected(pieces), *_not_run(content["pieces"])]


def _run(cells: Cells) -> Cells:
    return {name: cell for name, cell in cells.items() if not cell["lacks"]}


def _heading(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    cells = [cell for cells in content["pieces"].values() for cell in _run(cells).values()]
    dates, commits = sorted({cell["date"] for cell in cells}), sorted({cell["commit"] for cell in cells})
    cards = machine["devices"]
    card = f"{len(cards)} × {cards[0]} ({machine['gib'][0]} GiB)" if cards else "no GPU, models of no size on a CPU"
    named = {"driver": "driver", "cuda": "CUDA", "nccl": "NCCL", "cores": "cores", "python": "Python"}
    told = [f"{label} {machine[name]}" for name, label in named.items() if machine.get(name)]
    others = [f"{name} {machine[name]}" for name in machine if name not in (*named, "devices", "gib")]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{when}, {card}, {', '.join([*told, *others])}, commit {', '.join(commits)}: `make gpu`."


def _tests(cells: Cells) -> list[str]:
    rows = [
        [f"`{name}`", *(str(cell["found"].get(key, "")) for key in ("passed", "skipped")), _names(cell)]
        for name, cell in cells.items()
    ]
    return documents.markdown(["file", "passed", "skipped", "failed"], rows)


def _names(cell: Mapping[str, Any]) -> str:
    return ", ".join(cell["found"].get("failed", [])) or ("" if not cell["problem"] else cell["problem"])


def _matrix(cells: Cells) -> list[str]:
    reasons: list[str] = []
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, cell in cells.items():
        strategy, _, rest = name.partition(" at ")
        precision, _, devices = rest.partition(" × ")
        shown = documents.outcome(cell["found"].get("outcome", "fails"), reasons)
        rows.setdefault((strategy, devices), {})[precision] = shown
    head = ["strategy", "devices", *PRECISIONS]
    table = [[f"`{key[0]}`", key[1], *(row.get(one, "") for one in PRECISIONS)] for key, row in rows.items()]
    return [*documents.markdown(head, table), "", *(f"{number}. {one}" for number, one in enumerate(reasons, 1))]


def _parity(cells: Cells) -> list[str]:
    rows = [[name, _shown(cell["found"].get("largest_difference"))] for name, cell in cells.items()]
    return documents.markdown(["strategy × devices", "largest difference of train/loss over 50 steps"], rows)


def _resume(cells: Cells) -> list[str]:
    columns = list(dict.fromkeys(name for cell in cells.values() for name in cell["found"]))
    rows = [
        [name.removeprefix("from "), *(_shown(cell["found"].get(column)) for column in columns)]
        for name, cell in cells.items()
    ]
    return documents.markdown(["from \\ to", *columns], rows)


def _failures(cells: Cells) -> list[str]:
    rows = []
    for name, cell in cells.items():
        case, _, launcher = name.rpartition(": ")
        found = cell["found"]
        rows.append(
            [case, launcher, *(str(found.get(key, "")) for key in ("seconds", "code")), f"`{found.get('line')}`"]
        )
    head = ["what happens", "started by", "seconds until all is gone", "exit code", "the first line"]
    return documents.markdown(head, rows)


def _shared(cells: Cells) -> list[str]:
    rows = []
    for name, cell in cells.items():
        found = cell["found"]
        seen = found.get("outcome") or found.get("line") or _shown(found.get("largest_difference"))
        rows.append([*name.split(": ", 1), seen])
    return documents.markdown(["what", "of", "what came of it; of parity and resume, the largest difference"], rows)


def _parts(cells: Cells) -> list[str]:
    found = {name: cell["found"] for name, cell in cells.items() if cell["found"]}
    parts = list(dict.fromkeys(part for of_loop in found.values() for part in of_loop))
    rows = [[part, *(_shown(of_loop.get(part)) for of_loop in found.values())] for part in parts]
    told = "Milliseconds a step, by torch's profiler, whose own work is in the gaps; of a GPU, kernels by their names."
    return [told, "", *documents.markdown(["part", *found], rows)]


def _memory(cells: Cells) -> list[str]:
    keys = ("planned_gib", "measured_gib")
    rows = []
    for name, cell in cells.items():
        if found := cell["found"]:
            difference = "" if found["difference"] is None else f"{found['difference']:+.1%}"
            rows.append([name, *(f"{found[key]:.2f}" for key in keys), difference])
    return documents.markdown(["strategy × devices", "planned, GiB", "measured, GiB", "difference"], rows)


def _speed(cells: Cells) -> list[str]:
    rows = []
    for name, cell in cells.items():
        if not cell["found"]:
            continue
        found = cell["found"]
        rows.append([name, *_figures(found), _shown(found["ratio"]), ", ".join(map(str, found["save_seconds"]))])
        rows.append([f"a plain loop beside {name}", *_figures(found["plain"]), "1", ""])
    head = ["strategy × devices", "tokens a second", "share of the card's peak", "peak memory, GiB"]
    head += ["seconds to the first step", "time of a step, to the plain loop's", "seconds a save holds it up"]
    return documents.markdown(head, rows)


def _figures(found: Mapping[str, Any]) -> list[str]:
    keys = ("tokens_per_second", "share_of_peak", "peak_gib", "first_step_seconds")
    return ["" if found[key] is None else str(found[key]) for key in keys]


def _not_as_expected(pieces: Mapping[str, Cells]) -> Iterator[str]:
    bad = [(piece, name, cell["problem"]) for piece, cells in pieces.items() for name, cell in cells.items()]
    bad = [row for row in bad if row[2]]
    yield from ["", "### Not as expected", ""]
    told = [f"- {piece}, {name}: `{' '.join(problem.split())[:300]}`" for piece, name, problem in bad]
    yield from told or ["Nothing."]


def _not_run(pieces: Mapping[str, Cells]) -> Iterator[str]:
    left: dict[tuple[str, str], list[str]] = {}
    for piece, cells in pieces.items():
        for name, cell in cells.items():
            if cell["lacks"]:
                left.setdefault((piece, cell["lacks"]), []).append(name)
    if left:
        told = [f"- {piece}, {', '.join(names)}: {lacks}" for (piece, lacks), names in left.items()]
        yield from ["", "### Not run", "", *told]


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}" if abs(value) < 0.01 else f"{value:.3g}"


if __name__ == "__main__":
    main()
