"""Comparison of values between processes, by keyed digests and files, without sending values over the network.

Anyone who can connect to the store of a run can read and write it. A plain digest of a
short password could be guessed, so digests are keyed, and the key is in a file that only the run's user can read.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightswitch.errors import Refused
from lightswitch.regular_files import make_tree, remove_tree

_NAME = re.compile(r"\.meeting_[0-9a-f]{16}")
_KEY_BYTES = 32
HIDDEN = "\0"  # prefix of a digest that replaces a hidden value
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Values:
    """A resolved config as `{"optimizer.lr": "0.1", …}`.

    Args:
        hidden: keys of values that no message shows: they are from the environment, or named like secrets.
    """

    by_key: Mapping[str, str]
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sealed:
    """A folder in the run directory that exists while processes compare their values.

    Args:
        values: values of this process.
    """

    folder: Path
    key: bytes
    values: Values

    @classmethod
    def make(cls, run_dir: Path, values: Values) -> Sealed:
        """Create the folder and its key, in rank 0."""
        folder = make_tree(run_dir / f".meeting_{secrets.token_hex(8)}")
        folder.chmod(0o700)
        key = secrets.token_bytes(_KEY_BYTES)
        _write(folder / "key", key)
        return cls(folder, key, values)

    @classmethod
    def find(cls, run_dir: Path, name: str, values: Values, timeout_seconds: float) -> Sealed | None:
        """Open the folder that rank 0 has created; return None if this node does not see it in time.

        Args:
            name: the folder's name, from the store; for a name that `make` would not create, the result is None.
        """
        if not _NAME.fullmatch(name):
            return None
        end = time.monotonic() + timeout_seconds
        while True:
            with contextlib.suppress(OSError):
                if len(key := (run_dir / name / "key").read_bytes()) == _KEY_BYTES:
                    return cls(run_dir / name, key, values)
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_SECONDS)

    @functools.cached_property
    def digest(self) -> str:
        """The digest of all values of this process, equal to another process's only if every value is."""
        return self._keyed(json.dumps(dict(self.values.by_key), sort_keys=True))

    def leave(self) -> None:
        """Write this process's values to a file for rank 0, named by their digest; hidden values become digests."""
        with contextlib.suppress(OSError):  # another process has written the same values, or the message names none
            _write(self.folder / self.digest, json.dumps(self._shown()).encode())

    def read(self, digest: str) -> Mapping[str, str] | None:
        """Return the values with a digest, of this process or written by another; None if they can't be read."""
        if digest == self.digest:
            return self._shown()
        try:
            left: dict[str, str] = json.loads((self.folder / os.path.basename(digest)).read_bytes())
        except (OSError, ValueError):
            return None
        return left

    def remove(self) -> None:
        """Remove the folder, with the key and all values."""
        with contextlib.suppress(OSError, Refused):
            remove_tree(self.folder)

    def _shown(self) -> Mapping[str, str]:
        values = self.values.by_key.items()
        return {key: HIDDEN + self._keyed(text) if key in self.values.hidden else text for key, text in values}

    def _keyed(self, text: str) -> str:
        return hmac.digest(self.key, text.encode(), "sha256").hex()


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
