"""What the processes of a run compare without showing it to the network: a key, and values, in files of their own.

Whoever reaches the store where processes meet can read and write it. What can be guessed (a digest of a short password)
must not lie there, so that digests are keyed, and the key lies where the run's user alone can read it.
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
from lightswitch.trees import make_tree, remove_tree

_NAME = re.compile(r"\.meeting_[0-9a-f]{16}")
_KEY_BYTES = 32
HIDDEN = "\0"  # before the digest that stands for a value which is told to nobody
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Values:
    """A resolved config as `{"optimizer.lr": "0.1", …}`.

    Args:
        hidden: keys of values that are told to nobody: from the environment, or named as secrets are.
    """

    by_key: Mapping[str, str]
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sealed:
    """A folder in the run directory, for the time of the meeting.

    Args:
        values: what this process has.
    """

    folder: Path
    key: bytes
    values: Values

    @classmethod
    def make(cls, run_dir: Path, values: Values) -> Sealed:
        folder = make_tree(run_dir / f".meeting_{secrets.token_hex(8)}")
        folder.chmod(0o700)
        key = secrets.token_bytes(_KEY_BYTES)
        _write(folder / "key", key)
        return cls(folder, key, values)

    @classmethod
    def find(cls, run_dir: Path, name: str, values: Values, timeout_seconds: float) -> Sealed | None:
        """None where it can't be seen.

        Args:
            name: of the folder, as the network tells it; it may lead nowhere else.
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
        """Of all values of this process: the same as another's only where each is the same."""
        return self._keyed(json.dumps(dict(self.values.by_key), sort_keys=True))

    def leave(self) -> None:
        """For rank 0, which reads them by their digest. What is hidden is left as a digest of its own."""
        with contextlib.suppress(OSError):  # another process with the same has left it; or the line names no values
            _write(self.folder / self.digest, json.dumps(self._readable()).encode())

    def read(self, digest: str) -> Mapping[str, str] | None:
        """The values that this process has, or that another has left; None where there are none."""
        if digest == self.digest:
            return self._readable()
        try:
            left: dict[str, str] = json.loads((self.folder / os.path.basename(digest)).read_bytes())
        except (OSError, ValueError):
            return None
        return left

    def remove(self) -> None:
        with contextlib.suppress(OSError, Refused):
            remove_tree(self.folder)

    def _readable(self) -> Mapping[str, str]:
        values = self.values.by_key.items()
        return {key: HIDDEN + self._keyed(text) if key in self.values.hidden else text for key, text in values}

    def _keyed(self, text: str) -> str:
        return hmac.digest(self.key, text.encode(), "sha256").hex()


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
