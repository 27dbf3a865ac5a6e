"""A run without torch, for what a sweep does with any: it composes as train.py does, and ends at once."""

import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.cluster import placement
from lightswitch.launch.entry import entry
from lightswitch.runs import results


@entry(config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    with (run_dir / "starts").open("a") as starts:
        starts.write(f"{HydraConfig.get().mode.name}\n")
    if cfg.name == "broken" or (cfg.name == "half" and placement.detect().rank == 1):
        raise RuntimeError("it is broken\nfor a reason")
    if cfg.name == "waiting":
        (run_dir / "waits").touch()
    if cfg.name in ("waiting", "half"):
        time.sleep(60)
    results.write(run_dir, {"val/loss": cfg.seed / 4})


if __name__ == "__main__":
    main()
