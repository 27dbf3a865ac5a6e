"""The results so far, in a JSON file that is written after each cell: who runs out of time goes on from there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from tests.engine.gpu.cells import Result

_SAME = ("devices", "gib", "cuda", "torch")  # of machines whose results are told together


class OtherMachine(Exception):
    """Error of results that were made on another card, or with other versions."""


class Record:
    """
    Args:
        path: of the JSON file; it need not be there.
        machine: what it has to be of (`machine.described`). The driver is noted with each result: machines of the same
            card may have others.
        before: what it begins with where it is not there, if that is of such a machine.

    Raises:
        OtherMachine: it is of another one.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any], commit: str, before: Path | None = None) -> None:
        self.path, self.commit, self._driver = path, commit, machine.get("driver")
        self._lock = threading.Lock()
        own = {name: value for name, value in machine.items() if name != "driver"}
        if path.exists():
            self.content = _read(path)
            if changed := _changed(self.content["machine"], own):
                raise OtherMachine(
                    f"{path} holds results of another machine ({', '.join(changed)} differ); give another one by "
                    "RESULTS=, or remove it"
                )
        elif before is not None and before.exists() and not _changed(_read(before)["machine"], own):
            self.content = _read(before)
        else:
            self.content = {"machine": own, "pieces": {}}

    def results(self, piece: str) -> dict[str, Result]:
        """Return the results of a piece by the names of its cells, without those that were not run."""
        cells = self.content["pieces"].get(piece, {})
        return {name: Result(cell["found"], cell["problem"]) for name, cell in cells.items() if not cell["lacks"]}

    def put(self, piece: str, name: str, result: Result, seconds: float) -> None:
        """Keep a result, on disk as well."""
        self._write(piece, name, {**asdict(result), "lacks": "", "seconds": round(seconds, 1)})

    def put_not_run(self, piece: str, name: str, lacks: str) -> None:
        """Keep why a cell was not run."""
        self._write(piece, name, {"found": {}, "problem": "", "lacks": lacks, "seconds": 0})

    def _write(self, piece: str, name: str, cell: dict[str, Any]) -> None:
        with self._lock:
            cell |= {"date": date.today().isoformat(), "commit": self.commit, "driver": self._driver}
            self.content["pieces"].setdefault(piece, {})[name] = cell
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
            os.replace(new, self.path)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _changed(kept: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    return [name for name in _SAME if kept.get(name) != here.get(name)]
