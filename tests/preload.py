"""What the processes of tests have imported before they start: torch, the engine, and the code that conf names."""

from __future__ import annotations

import contextlib
import os
import re
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as a run's entry sets it, before it imports torch

from hydra import compose, initialize_config_dir

from lightswitch.config.hydra_versions import VERSION

CONF = Path(__file__).parents[1] / "conf"
MODULES = ["pytest", "lightning.pytorch", "torchmetrics.classification", "torch.utils.tensorboard"]
MODULES += [f"lightswitch.launch.{name}" for name in ("auto", "build", "dry_run", "entry", "hydra_entry")]
MODULES += [f"lightswitch.launch.{name}" for name in ("plan", "report", "stages")]
MODULES += ["lightswitch.runs.resume", "lightswitch.cluster.environments", "hydra._internal.logging_config"]
MODULES += ["fsspec.implementations.chained", "torch.profiler._cupti_monitor", "torch.utils.serialization.config"]
MODULES += ["lightswitch.preflight.check"]
MODULES += ["sklearn.datasets", "transformers", "peft"]  # seconds
# a second: DeepSpeed imports torch's inductor with one of its optimizers, whichever is used
MODULES += ["lightswitch.deepspeed.strategy", "deepspeed.runtime.zero.muon.muon_optimizer"]
MODULES += ["deepspeed.module_inject.auto_ep_config", "deepspeed.module_inject.auto_ep_layer"]


def _modules_of(group: str) -> set[str]:
    texts = (path.read_text() for path in (CONF / group).glob("*.yaml"))
    return {module for text in texts for module in re.findall(r"_target_: ([\w.]+)\.\w+$", text, re.MULTILINE)}


for module in [
    *MODULES,
    *sorted(set.union(*map(_modules_of, ("strategy", "model", "data", "callbacks", "logger", "trainer")))),
]:
    with contextlib.suppress(Exception):  # a run that needs it will tell
        import_module(module)

with contextlib.suppress(Exception), initialize_config_dir(str(CONF), **VERSION):
    compose(
        "config", ["trainer.max_steps=3", "+trainer.list=[1]"], return_hydra_config=True
    )  # its grammar learns as it parses
