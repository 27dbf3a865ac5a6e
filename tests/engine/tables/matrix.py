"""What every strategy does at every precision: real runs of a few steps.

python -m tests.engine.tables.matrix            # fills the rows of the accelerators that are there: docs/strategies.md
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import torch

from tests.engine.conftest import CHECKOUT, Finished, Train, runs_in
from tests.engine.tables import documents
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import PLAN

CELLS = documents.DOCS / "matrix.json"
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")
STRATEGIES = sorted(path.stem for path in (CHECKOUT / "conf" / "strategy").glob("*.yaml"))
ON_ONE_DEVICE = ("single", "ddp_spawn", "ddp_fork")  # of themselves, they start their processes by other means
FOUR = ("fsdp_hybrid", "fsdp_tp")
RUN = (
    *LANGUAGE,
    "trainer.max_steps=3",
    "trainer.val_check_interval=3",
    "micro_batch_size=null",
    "trainer.limit_val_batches=1",
    "optimizer.eps=1e-4",  # 16-true holds no less
    "run_id=cell",
)
EXTRA = {
    "deepspeed": ("trainer.strategy.config={train_micro_batch_size_per_gpu: auto, zero_optimization: {stage: 2}}",),
    "fsdp_hybrid": ("trainer.strategy.shard_size=2",),
    "fsdp_tp": (PLAN,),
}
Cells = dict[str, dict[str, dict[str, str]]]  # accelerator, strategy, precision: "trains", or why it is refused


def main() -> None:
    cells: Cells = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    for accelerator in ("cpu", "gpu") if torch.cuda.is_available() else ("cpu",):
        with tempfile.TemporaryDirectory() as folder:
            cells[accelerator] = {
                strategy: _row(runs_in(Path(folder)), accelerator, strategy) for strategy in STRATEGIES
            }
    documents.keep(CELLS, cells)
    documents.put("strategies.md", "matrix", _document(cells))


def _row(train: Train, accelerator: str, strategy: str) -> dict[str, str]:
    row = {precision: cell(train, accelerator, strategy, precision) for precision in PRECISIONS}
    print(accelerator, strategy, row, flush=True)
    return row


def cell(train: Train, accelerator: str, strategy: str, precision: str) -> str:
    switches = (f"strategy={strategy}", f"precision={precision}", f"trainer.accelerator={accelerator}")
    finished = train(*RUN, *switches, *EXTRA.get(strategy, ()), ranks=_ranks(accelerator, strategy), check=False)
    return _told(finished)


def _ranks(accelerator: str, strategy: str) -> int:
    if accelerator == "gpu" or strategy in ON_ONE_DEVICE:
        return 0
    return 4 if strategy in FOUR else 2


def _told(finished: Finished) -> str:
    if finished.returncode == 0:
        return "trains" if all(map(math.isfinite, finished.column("val/loss").values())) else "its loss is not finite"
    lines = [line.removeprefix("error: ") for line in finished.err.splitlines() if line.startswith("error: ")]
    if finished.returncode == 2 and lines:
        return lines[0]
    return f"fails: {finished.err.strip().splitlines()[-1] if finished.err.strip() else finished.returncode}"


def _document(cells: Cells) -> list[str]:
    reasons: list[str] = []
    rows = [
        [f"`{strategy}`", accelerator, *(_shown(row[precision], reasons) for precision in PRECISIONS)]
        for accelerator, strategies in cells.items()
        for strategy, row in strategies.items()
    ]
    table = documents.markdown(["strategy", "accelerator", *PRECISIONS], rows)
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return [documents.made("python -m tests.engine.tables.matrix"), "", *table, "", *notes]


def _shown(found: str, reasons: list[str]) -> str:
    if found == "trains":
        return found
    if found not in reasons:
        reasons.append(found)
    return f"no ({reasons.index(found) + 1})"


if __name__ == "__main__":
    main()
