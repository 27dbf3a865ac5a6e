"""How long a run stands still when a machine is lost, by part, for measured/elastic.md.

python -m tests.engine.elastic       # as root, in about two minutes
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.engine.elastic.agents import Agents, Machines
from tests.engine.tables import documents

LOSSES = 6
# as short as they can be on a machine that does nothing else: a node is lost after 6 s without a sign of life
RDZV_CONF = "join_timeout=300,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
LOST_AFTER = "watch.lost_after_seconds=10"
PARTS = (
    ("noticed and stopped", "the processes that are left have ended"),
    ("met", "torchrun has given the node up, its agents have met, and new processes run"),
    ("imported and built", "Python's imports, model, data and Trainer"),
    ("joined and read", "the ranks have met, shared the model, and read the checkpoint"),
    ("first step", "a step is trained"),
)


def main() -> None:
    with TemporaryDirectory() as folder, Machines(nodes=3) as machines:
        agents = Agents(machines, Path(folder), Path(sys.executable), "ddp", 1, LOST_AFTER)
        try:
            found = list(_losses(agents))
        finally:
            agents.end()
    for seconds in found:
        print(" ".join(f"{one:.1f}" for one in seconds), flush=True)
    rows = []
    for number, (part, meaning) in enumerate(PARTS):
        of_part = [seconds[number] for seconds in found]
        rows.append([part, meaning, f"{statistics.median(of_part):.1f}", f"{max(of_part):.1f}"])
    ours = [sum(seconds) - seconds[1] for seconds in found]
    rows.append(["all but torchrun's", "", f"{statistics.median(ours):.1f}", f"{max(ours):.1f}"])
    head = ["part", "until", f"median of {LOSSES}, s", "most, s"]
    told = f"{documents.made('python -m tests.engine.elastic')} `strategy=ddp`, one process a node, `{RDZV_CONF}`."
    documents.put("elastic", [*documents.markdown(head, rows), "", told])


def _losses(agents: Agents) -> Iterator[list[float]]:
    """Yield the seconds of each part, of several losses of one of two nodes."""
    agents.join(1, 2, conf=RDZV_CONF)
    agents.until_trains_on(1, 2)
    for number in range(LOSSES):
        lost, left = (1, 2) if number % 2 else (2, 1)
        agents.until(lambda: agents.step > 10)
        workers, noted = agents.workers(left), len(agents.moments())
        began = time.time()
        agents.lose(lost)
        psutil.wait_procs(workers)
        stopped = time.time()
        agents.until(lambda noted=noted: len(agents.moments()) > noted)  # type: ignore[misc]  # its own default
        moments = agents.moments()[noted]
        ends = [stopped, *(moments[name] for name in ("created", "built", "started", "stepped"))]
        yield [end - start for start, end in zip([began, *ends], ends, strict=False)]
        agents.join(lost, conf=RDZV_CONF)
        agents.until_trains_on(1, 2)


if __name__ == "__main__":
    main()
