"""What runs wrote, for a test to compare: their curves and their predictions."""

from __future__ import annotations

import torch

from tests.engine.conftest import Finished


def largest_difference(found: Finished, expected: Finished, metric: str = "train/loss") -> float:
    """Of the two curves, which have the same steps, at any of them."""
    a, b = found.column(metric), expected.column(metric)
    assert a.keys() == b.keys(), metric
    return max(abs(a[step] - b[step]) for step in b)


def predictions(run: Finished) -> torch.Tensor:
    """In the order of the data, of all ranks."""
    files = sorted((run.run_dir / "predictions").glob("rank_*.pt"))
    return torch.cat([batch for file in files for batch in torch.load(file)])
