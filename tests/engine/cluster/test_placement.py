"""Who started this process, where processes meet, and whether they were given the same."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lightswitch.cluster.environments import LocalEnvironment
from lightswitch.cluster.placement import Placement, detect
from lightswitch.cluster.rendezvous import MeetingPoint, agree_on_id, difference, digests, open_store
from lightswitch.errors import Refused
from lightswitch.runs.claim import meeting_place

TABLES = yaml.safe_load((Path(__file__).parent / "placements.yaml").read_text())
LAUNCHERS: dict[str, dict[str, str]] = TABLES["launchers"]
TORCHRUN, BATCH_SHELL, SRUN, EXPORTED = (LAUNCHERS[name] for name in ("torchrun", "batch_shell", "srun", "exported"))


@pytest.mark.parametrize("case", TABLES["placements"])
def test_placement_is_read_from_the_environment(case: str) -> None:
    row = TABLES["placements"][case]
    assert detect(row["environ"]) == Placement(**row["place"])
    assert detect(row["environ"]).is_external == (row["place"]["launcher"] != "local")


# The port at which the processes that one process starts will meet


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> LocalEnvironment:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return LocalEnvironment()


def test_nobody_is_given_the_port_of_a_run_before_its_rank_0_listens(local: LocalEnvironment) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", local.main_port))  # what the kernel asks of itself for a port it hands out


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_rank_0_can_listen_there(local: LocalEnvironment, address: str) -> None:
    with socket.create_server((address, local.main_port)):
        socket.create_connection(("127.0.0.1", local.main_port)).close()


def test_a_port_that_was_given_is_not_another(local: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert local.main_port == 29511


def test_processes_meet_to_take_the_id_of_rank_0(port: str) -> None:
    first = MeetingPoint("localhost", int(port), 0, 2, timeout_seconds=5)
    named, meeting = agree_on_id(first, "of rank 0")
    assert (named, agree_on_id(replace(first, rank=1), "of rank 1")[0]) == ("of rank 0", "of rank 0")
    with pytest.raises(Refused, match=f"port {port} of .* is in use"):
        agree_on_id(first, "of another run")
    open_store(first, "meeting", meeting).set("heard", "here")
    assert open_store(replace(first, rank=1), "meeting").get("heard") == b"here"  # where the group is formed later


@pytest.mark.parametrize("case", TABLES["meetings"])
def test_the_place_to_meet_is_that_of_the_launcher_or_of_cluster_manual(case: str) -> None:
    row = TABLES["meetings"][case]
    found = meeting_place(detect(row["environ"]), row["environ"], OmegaConf.create(row.get("cfg", {})))
    assert found == (row["meets"] and tuple(row["meets"]))


# Processes that were given different things, and what they are told

FIRST = {
    "rank": 0, "node": "node1", "run_dir": "/runs/a",
    "versions": {"torch": "2.13.0"}, "code": {"src/net.py": "b"}, "config": {"seed": "1", "name": "12:00"},
}  # fmt: skip
OTHERS = [{"rank": rank, "node": f"node{rank // 2 + 1}", "run_dir": "/runs/a", "sees_mark": True} for rank in (1, 2, 3)]


@pytest.mark.parametrize("case", TABLES["differences"])
def test_the_odd_ones_are_named_with_what_they_have(case: str) -> None:
    row = TABLES["differences"][case]
    assert difference(FIRST, [one | row["changed"].get(one["rank"], {}) for one in OTHERS]) == row["told"]


def test_a_link_to_nothing_is_no_code(tmp_path: Path) -> None:
    """Such as an editor's lock beside the file that it edits."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/net.py").write_text("x = 1\n")
    (tmp_path / "src/.#net.py").symlink_to("me@here.4711")
    assert list(digests([tmp_path / "src"])) == ["src/net.py"]
