"""Where a rank stands is told by the user's own line, wherever the user's package lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightswitch
from lightswitch.fault_tolerance.stacks import thread_position


def test_a_package_beside_the_engine_is_the_users_own() -> None:
    beside = str(Path(lightswitch.__file__).parents[1] / "birdsong/net.py")
    names: dict[str, Any] = {"thread_position": thread_position}
    exec(compile("def training_step():\n    return thread_position()\n", beside, "exec"), names)
    assert names["training_step"]().location.startswith(f"{beside}:2 in training_step")
