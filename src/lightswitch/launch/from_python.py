"""Runs from a notebook or a script: the words of the command line, in processes of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as compose_by_hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch.cluster import placement
from lightswitch.config import hydra_versions
from lightswitch.config.hydra_errors import NO_YAML, check_flags, problems_of_composition
from lightswitch.config.overrides import asks_for_a_sweep, normalised
from lightswitch.errors import Refused, RefusedRequest
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.runs import finished

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class FailedRun(RuntimeError):
    """A run that was refused or has failed, with the line that its command has printed.

    Attributes:
        exit_code: of the command (`lightswitch.errors.ExitCode`).
    """

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Run:
    """A run and what it has left in its directory."""

    directory: Path

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the run's end, by name; empty if it has not ended."""
        return finished.read_results(self.directory)

    @property
    def config(self) -> DictConfig:
        """The config of the run, as its directory records it."""
        config = OmegaConf.load(self.directory / "config.yaml")
        assert isinstance(config, DictConfig)
        return config

    def load(self) -> LightningModule:
        """Return the model with the weights of the best checkpoint, else the last (`lightswitch.load`)."""
        from lightswitch.export.models import load

        return load(self.directory)

    def data(self, stage: str = "fit") -> Any:
        """Return the data module, set up for a stage with the run's seed: a random split is that of the run.

        Args:
            stage: fit, validate, test or predict.
        """
        from lightning.pytorch import seed_everything
        from lightning.pytorch.utilities.seed import isolate_rng

        config = self.config
        with isolate_rng():
            seed_everything(config.seed, workers=True, verbose=False)
            data = hydra_versions.instantiate(config.data)
            for prepare in (data.prepare_data, lambda: data.setup(stage)):
                seed_everything(config.seed, workers=True, verbose=False)
                prepare()
        return data


def train(*words: str, script: str | Path = "train.py") -> Run:
    """Run `python train.py WORDS` and return the run. Its output is this process's; its ranks are its own processes.

    An interrupt (Ctrl+C, or of a notebook's kernel) lets the run save a checkpoint and end, and is raised after that;
    the same `run_id=` resumes it.

    Args:
        words: what follows `python train.py` on the command line, each a word; `mode=test` and other modes as well.
        script: path of the project's train.py, relative to the working directory.

    Raises:
        Refused: the words can't be composed, or ask for a sweep.
        FailedRun: the run was refused, or has failed.
    """
    if asks_for_a_sweep([*words]):
        raise Refused("lightswitch.train runs one run; type a sweep as a command: python train.py -m …")
    script = _found(script)
    config, directory = _composed(script, *words)
    command = [sys.executable, "-u", os.path.relpath(script), *words, f"run_id={config.run_id}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = _passed_on(process)
        except KeyboardInterrupt:
            process.terminate()  # a terminal has sent the interrupt to the command as well: twice would mean at once
            _passed_on(process)
            raise
    if process.returncode:
        raise FailedRun(told or f"exit code {process.returncode} of {shlex.join(command)}", process.returncode)
    return Run(directory)


def compose(*words: str, script: str | Path = "train.py") -> DictConfig:
    """Return the config of `python train.py WORDS`, with every value resolved: `instantiate(compose(…).model)` works.

    Raises:
        Refused: there is no such script, or no such key or choice.
    """
    return _composed(_found(script), *words)[0]


def _composed(script: Path, *words: str) -> tuple[DictConfig, Path]:
    """Return a config without the node `hydra`, and the directory of its run."""
    register_resolvers(placement.detect())
    now = HydraConfig.instance()
    before = GlobalHydra.instance().hydra, now.cfg  # of a notebook that composes configs of its own
    try:
        check_flags(normal := normalised([*words]), [*words])
        with initialize_config_dir(str(script.parent / "conf"), **hydra_versions.VERSION):
            config = compose_by_hydra("config", normal, return_hydra_config=True)
        directory = Path(config.hydra.run.dir).absolute()
        config.hydra.runtime.output_dir, config.hydra.runtime.cwd = str(directory), str(Path.cwd())
        now.set_config(config)
        OmegaConf.set_struct(config, False)
        del config.hydra
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, *NO_YAML) as error:
        raise RefusedRequest(problems_of_composition(error)) from None
    finally:
        GlobalHydra.instance().hydra, now.cfg = before
    return config, directory


def _found(script: str | Path) -> Path:
    path = Path(script).absolute()
    if not path.is_file():
        raise Refused(f"found no {script} here; change to the project's folder, or name it: script='…/train.py'")
    return path


def _passed_on(process: subprocess.Popen[str]) -> str:
    """Pass on what a command writes to stderr until it ends, and return its last error line."""
    told = ""
    for line in process.stderr or ():
        sys.stderr.write(line)
        if line.startswith("error: "):
            told = line.removeprefix("error: ").strip()
    process.wait()
    return told
