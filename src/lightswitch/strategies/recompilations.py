"""Recompilations by torch.compile beyond the first few, told with their reason."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path

from torch._logging import _internal as torch_logs

log = logging.getLogger(__name__)

_EXPECTED = 4  # of a function: without gradients, in inference mode, for a smaller last batch, and for any batch


def tell_recompilations() -> None:
    """Log each recompilation of a function after the first few, from now on.

    Where TORCH_LOGS is set, torch logs what that asks for, and nothing else.
    """
    if "TORCH_LOGS" in os.environ:
        return
    torch_logs.set_logs(recompiles=True)
    logger = torch_logs.getArtifactLogger("torch._dynamo.guards", "recompiles")
    logger.propagate = False  # torch's own handler prints each, the expected ones among them
    logger.addHandler(_Recompilations())


class _Recompilations(logging.Handler):
    """Handler of torch's records of recompilations: `Recompiling function NAME in FILE:LINE`, and a reason a line."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Count a function's recompilations, and log those beyond the expected ones."""
        first, *reasons = record.getMessage().splitlines()
        name, _, place = first.removeprefix("Recompiling function ").partition(" in ")
        self._counts[first] += 1
        if self._counts[first] > _EXPECTED:
            reason = next((line.strip(" -") for line in reasons if line.strip().startswith("-")), "unknown")
            log.warning(
                "compiled again, %d times now: %s of %s, as %s", self._counts[first], name, Path(place).name, reason
            )
