"""Cases for the night: repetitions, over a further strategy or moment, of what another case shows each day."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet


def at_night(*cases: Any) -> list[ParameterSet]:
    """Return cases of a parametrized test that `make test-nightly` runs; one of several values is a tuple."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in values]
