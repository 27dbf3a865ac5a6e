"""What `make gpu` does, tried where there is no GPU, so that its first time on one is not lost to a mistake in it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightswitch.preflight import strategies
from lightswitch.preflight.strategies import Request
from tests.engine.conftest import CHECKOUT
from tests.engine.gpu.__main__ import FAILED, MISTAKEN, PASSED, PIECES, UNFINISHED, main, run
from tests.engine.gpu.cells import Cell, OtherMachine, Piece, Record, Result, Scale
from tests.engine.gpu.pieces import TRAINS, expected
from tests.engine.tables.documents import MEASURED
from tests.engine.tables.gpu import NOTHING, document
from tests.engine.tables.matrix import EXTRA, PRECISIONS, STRATEGIES
from tests.engine.test_every_switch import composed  # noqa: F401  # a fixture

MACHINE = {"devices": ["a card"], "gib": [80], "torch": "2.13.0"}


@pytest.mark.timeout(3600)  # thirty runs, each of which imports torch
def test_the_whole_path_is_taken_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = ["python", "-m", "tests.engine.gpu", "--tiny", "--results", str(out)]
    finished = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    content = json.loads(out.read_text())
    assert list(content["pieces"]) == list(PIECES)
    page = "\n".join(document(content))
    for told in (
        "| `single` | 1 | trains |",
        "| ddp × 2 | ",
        "| single × 1 at bf16-mixed | ",
        "a plain loop beside fsdp × 1",
    ):
        assert told in page
    assert page.partition("## Not as expected\n\n")[2].startswith("Nothing.")


def test_a_page_of_no_results_says_that_nothing_was_measured() -> None:
    assert document({}) == [NOTHING]
    assert (NOTHING in (MEASURED / "gpu.md").read_text()) != (MEASURED / "gpu.json").exists()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_expected_of_a_gpu_is_what_the_engine_refuses(strategy: str, devices: int, composed: Any) -> None:  # noqa: F811
    cfg = composed(f"strategy={strategy}", f"trainer.devices={devices}", *EXTRA.get(strategy, ()))
    plain = OmegaConf.to_container(cfg, resolve=True)
    trainer, model = plain["trainer"], plain["model"]
    for precision in PRECISIONS:
        at = {**trainer, "precision": precision}
        request = Request(trainer["strategy"], model, at, 1, devices, accelerator="cuda", batch=(24, None))
        wanted = expected(strategy, precision, devices)
        assert list(strategies.problems(request))[:1] == ([] if wanted == TRAINS else [wanted])


# What is kept, and what is run again


def _record(folder: Path, **other: Any) -> Record:
    return Record(folder / "gpu.json", {**MACHINE, **other}, "abc123")


def _run(piece: Piece, record: Record, seconds: float = 3600) -> int:
    return run(piece, record, time.monotonic() + seconds)


def test_a_piece_goes_on_where_its_time_was_up(tmp_path: Path) -> None:
    ran: list[str] = []

    def cell(name: str, seconds: float) -> Cell:
        def act(folder: Path, left_seconds: float, so_far: Mapping[str, Result]) -> Result:
            ran.append(name)
            time.sleep(min(seconds, left_seconds) if ran.count(name) == 1 else 0)
            return Result({"had": len(so_far)})

        return Cell(name, act)

    piece = Piece("one", [cell("a", 0), cell("b", 3600), cell("c", 0)])
    assert _run(piece, _record(tmp_path), seconds=5) == UNFINISHED  # the end cuts b off
    assert _run(piece, _record(tmp_path)) == PASSED
    assert ran == ["a", "b", "b", "c"]
    assert _record(tmp_path).results("one") == {name: Result({"had": n}) for n, name in enumerate("abc")}


def test_what_is_not_as_expected_fails_and_is_named_on_the_page(tmp_path: Path) -> None:
    def raises(*_: Any) -> Result:
        raise KeyError("no such thing")

    cells = [
        Cell("wrong", lambda *_: Result({"largest_difference": 0.5}, "differs by 0.5")),
        Cell("broken", raises),
        Cell("slow", lambda *_: time.sleep(0.2) or Result({"largest_difference": 0.0}), limit_seconds=0.1),
        Cell("absent", raises, lacks="needs 2 GPUs"),
    ]
    assert _run(Piece("parity", cells), _record(tmp_path)) == FAILED
    page = document(_record(tmp_path).content)
    assert "- parity, wrong: `differs by 0.5`" in page
    assert "- parity, broken: `KeyError: 'no such thing'`" in page
    assert "- parity, slow: `took more than 0 s`" in page
    assert "- parity, absent: needs 2 GPUs" in page


def test_results_of_two_machines_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(Piece("parity", [Cell("a", lambda *_: Result({"largest_difference": 0.0}))]), _record(tmp_path))
    with pytest.raises(OtherMachine, match=r"of another machine \(torch differ\); give another one by RESULTS="):
        _record(tmp_path, torch="2.14.0")
    assert main(["parity", "--tiny", "--results", str(tmp_path / "gpu.json")]) == MISTAKEN
    assert "holds results of another machine" in capsys.readouterr().err


def test_pieces_for_a_gpu_have_all_their_cells() -> None:
    one, two = (
        {name: piece(Scale("gpu", devices, False)).cells for name, piece in PIECES.items()} for devices in (1, 2)
    )
    assert [len(cells["matrix"]) for cells in (one, two)] == [n * len(STRATEGIES) * len(PRECISIONS) for n in (1, 2)]
    assert {cell.lacks for cell in one["failures"]} == {"needs 2 GPUs"}
    assert {cell.lacks for cell in two["failures"]} == {""}
    assert any(cell.name == "ddp × 2" and not cell.lacks for cell in two["benchmark"])
    for cells in (*one.values(), *two.values()):
        assert len({cell.name for cell in cells}) == len(cells) > 0
