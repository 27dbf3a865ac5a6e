"""A run whose hub is crowded by strangers from before the first rank joins."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

from lightswitch.strategies.ddp import DDP

_STRANGERS = 600


class AttackedDDP(DDP):
    """Rank 1 attacks the hub, whose address rank 0 has just told it, and joins it then."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        told = super().broadcast(obj, src)
        if isinstance(told, tuple) and len(told) == 5 and self.global_rank == 1:
            _, address, port, *_ = told
            Path("attacked").write_text(str(address))
            for _ in range(4):
                threading.Thread(target=_attack, args=(address, port), daemon=True).start()
            time.sleep(2)
        return told


def _attack(address: str, port: int) -> None:
    kept = []
    for number in range(_STRANGERS):
        try:
            stranger = socket.create_connection((address, port), 1)
            stranger.setblocking(False)
            stranger.send(b"x" * (31 if number % 2 else 1 << 20))
            kept.append(stranger)
        except OSError:
            time.sleep(0.01)
    time.sleep(5)
