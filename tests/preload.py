"""What the processes of tests have imported before they start: torch, the engine, and the code that conf names."""

from __future__ import annotations

import contextlib
import re
from importlib import import_module
from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"
MODULES = ["lightning.pytorch", "torchmetrics.classification", "torch.utils.tensorboard", "lightswitch.launch.build"]
MODULES += ["sklearn.datasets", "transformers", "peft"]  # seconds


def _modules_of(group: str) -> set[str]:
    texts = (path.read_text() for path in (CONF / group).glob("*.yaml"))
    return {module for text in texts for module in re.findall(r"_target_: ([\w.]+)\.\w+$", text, re.MULTILINE)}


for module in [*MODULES, *sorted(_modules_of("strategy") | _modules_of("model") | _modules_of("data"))]:
    with contextlib.suppress(Exception):  # a run that needs it will tell
        import_module(module)
