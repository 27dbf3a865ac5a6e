"""A run without torch, for what a sweep does with any: it composes as train.py does, and ends at once."""

import math
import os
import signal
import time

from omegaconf import DictConfig

from lightswitch.context import RunContext
from lightswitch.launch.entry import entry
from lightswitch.regular_files import write_json


@entry(config_path="conf", config_name="config")
def main(cfg: DictConfig, run: RunContext) -> None:
    is_first = not (run.run_dir / "starts").exists()
    with (run.run_dir / "starts").open("a") as starts:
        starts.write(f"{run.hydra.mode.name}\n")
    if cfg.name == "broken" or (cfg.name == "broken_once" and is_first):
        raise RuntimeError("it is broken\nfor a reason")
    if cfg.name == "killed_once" and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    while cfg.name.startswith("pair") and len(list(run.run_dir.parent.glob("*/starts"))) < 2:
        time.sleep(0.05)
    if cfg.name == "waiting":
        (run.run_dir / "waits").touch()
        time.sleep(3600)
    write_json(run.run_dir / "results.json", {"val/loss": math.nan if cfg.name == "nan" else cfg.seed / 4})


if __name__ == "__main__":
    main()
