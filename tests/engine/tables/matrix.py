"""What every strategy does at every precision: real runs of a few steps.

python -m tests.engine.tables.matrix            # fills measured/matrix.md; tests.engine.gpu runs the cells on GPUs
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from tests.engine.conftest import CHECKOUT, Finished, Train, runs_in
from tests.engine.tables import documents
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import PLAN

CELLS = documents.MEASURED / "matrix.json"
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")
STRATEGIES = sorted(path.stem for path in (CHECKOUT / "conf" / "strategy").glob("*.yaml"))
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
    with tempfile.TemporaryDirectory() as folder:
        cells = {"cpu": {strategy: _row(runs_in(Path(folder)), "cpu", strategy) for strategy in STRATEGIES}}
    documents.keep(CELLS, cells)
    documents.put("matrix", _document(cells))


def _row(train: Train, accelerator: str, strategy: str) -> dict[str, str]:
    row = {precision: cell(train, accelerator, strategy, precision, devices(strategy)) for precision in PRECISIONS}
    print(accelerator, strategy, row, flush=True)
    return row


ITSELF = ("single", "ddp_spawn")  # strategies that take no ranks of a launcher


def devices(strategy: str) -> int:
    """Return how many a strategy is tried on where there are no GPUs."""
    return 4 if strategy in FOUR else 1 if strategy == "single" else 2


def cell(
    train: Train, accelerator: str, strategy: str, precision: str, devices: int, timeout_seconds: int = 200
) -> str:
    """Return what a strategy does at a precision: "trains", why it is refused, or how it fails."""
    by_itself = strategy in ITSELF
    switches = (
        *(f"strategy={strategy}", f"precision={precision}", f"trainer.accelerator={accelerator}"),
        *([f"trainer.devices={devices}"] if by_itself else []),
        *EXTRA.get(strategy, ()),
    )
    ranks = 0 if by_itself else devices
    return _told(train(*RUN, *switches, ranks=ranks, timeout_seconds=timeout_seconds, check=False))


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
        [f"`{strategy}`", accelerator, *(documents.outcome(row[precision], reasons) for precision in PRECISIONS)]
        for accelerator, strategies in cells.items()
        for strategy, row in strategies.items()
    ]
    table = documents.markdown(["strategy", "accelerator", *PRECISIONS], rows)
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return [documents.made("python -m tests.engine.tables.matrix"), "", *table, "", *notes]


if __name__ == "__main__":
    main()
