"""The numbers that documents tell of a run or a machine: where each stands, and what shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.engine.conftest import CHECKOUT


@dataclass(frozen=True)
class Claim:
    """A number in a document.

    Args:
        document: its path in the checkout.
        quote: a pattern of its words, which the page takes from the document as they stand there.
        shown_by: the test that holds it, or the command that measured it; empty where none was kept.
        date: of the measurement; a pattern, where the document itself has it. Empty of what a test holds.
    """

    document: str
    quote: str
    shown_by: str = ""
    date: str = ""

    @property
    def words(self) -> str:
        """The words as they stand in the document.

        Raises:
            AssertionError: it does not have them.
        """
        return _found(self.quote, " ".join(self.text.split()))

    @property
    def day(self) -> str:
        """The date of the measurement."""
        return _found(self.date, self.text) if "(" in self.date else self.date

    @property
    def text(self) -> str:
        """The document's."""
        return (CHECKOUT / self.document).read_text()


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[match.re.groups and 1]


_CLAIMS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
HELD, MEASURED = (tuple(Claim(**claim) for claim in _CLAIMS[kind]) for kind in ("held", "measured"))
