"""What two runs have in common: the metrics that they wrote."""

from __future__ import annotations

from tests.engine.conftest import Finished


def largest_difference(found: Finished, expected: Finished, metric: str = "train/loss") -> float:
    """Of the two curves, which have the same steps, at any of them."""
    a, b = found.column(metric), expected.column(metric)
    assert a.keys() == b.keys(), metric
    return max(abs(a[step] - b[step]) for step in b)
