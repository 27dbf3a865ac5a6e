"""The check of a module by mode=check: whether it keeps the promises, on its own data and config."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.batches.plan import BatchPlan
from lightswitch.checking import causes, table
from lightswitch.checking.causes import Cause, Evidence
from lightswitch.checking.comparison import Comparison, states
from lightswitch.checking.runs import Ended, Measured, Starter, Way, measure
from lightswitch.checking.table import DIAGNOSED, Cell, cells
from lightswitch.config import groups
from lightswitch.config.values import AUTO
from lightswitch.context import RunContext
from lightswitch.errors import Ended as RunEnded
from lightswitch.errors import ExitCode, Refused, RefusedRequest, shown
from lightswitch.launch import commands

log = logging.getLogger(__name__)

_OF_RUNS = (  # what each run has of its own, which is typed for none
    *("strategy", "trainer.strategy", "cluster", "resume", "ckpt_path", "compare"),
    *(f"trainer.{key}" for key in ("accelerator", "log_every_n_steps", "num_sanity_val_steps")),
    *("trainer.limit_test_batches", "trainer.enable_checkpointing", "trainer.fast_dev_run"),
)
_ALIKE = ("start_method",)  # another start of the same strategy
_MODULES = ("build", "stages", "report", "auto", "hydra_entry")  # of launch, which each run imports
_EPS = {"bf16": 2.0**-7, "16": 2.0**-10}  # by how a precision's name begins
_EPS_32 = 2.0**-23
_NUDGE = 8  # units in the last place
NEEDS_GPU = re.compile(r"NVIDIA driver|not compiled with CUDA|CUDA (?:device|error|is not|unavailable)|No CUDA|nvcc")


def check(cfg: DictConfig, run: RunContext) -> None:
    """Train a few steps in one process and under each strategy, log a table of the promises, and write check.json.

    Raises:
        Ended: with exit code 1, where a promise does not hold.
        Refused: the module does not train in one process.
    """
    with tempfile.TemporaryDirectory(dir=run.run_dir, prefix="check_", ignore_cleanup_errors=True) as folder:
        runs = _Runs(cfg, run, Path(folder))
        found = runs.check()
    path = run.run_dir / "check.json"
    regular_files.write_text(path, json.dumps(table.check_as_data(found), indent=1) + "\n")
    log.info("\n%s\n", table.as_text(found))
    for line in table.lines(found):
        log.info("%s", line)
    log.info("check      %s", shown(path))
    if table.is_broken(found):
        raise RunEnded(ExitCode.FAILED)


class _Runs:
    """The runs of a check, in a folder of their own."""

    def __init__(self, cfg: DictConfig, run: RunContext, folder: Path) -> None:
        import torch

        self._cfg, self._run, self._folder = cfg, run, folder
        self._typed = commands.overrides_of_run(without=_OF_RUNS)
        self._on_gpus = torch.cuda.device_count() >= cfg.check.devices
        ranks = max(1, (os.cpu_count() or 1) // cfg.check.devices)
        environment = {"OMP_NUM_THREADS": str(ranks), "WANDB_MODE": "offline"}
        self.single = Way("single", ("strategy=single",), 1)
        self.ways = [self.single, *self._ways()]
        self._starter = Starter(Path(sys.argv[0]).absolute(), self._preloaded(), environment)
        self._precision = str(cfg.trainer.get("precision") or "32")

    def check(self) -> table.Found:
        """Run all, and return what was found.

        Raises:
            Refused: the module does not train in one process.
        """
        one = self._measure(self.single)
        if not one.is_trained:
            self._refuse(one.whole)
        nudged = states(self.start(self.single, "nudged", nudge=_NUDGE * self._eps).moments)
        whole, again = one.states["whole"], one.states["killed"]
        parameters = one.whole.moments[0]["parameters"]
        comparison = Comparison(whole, again, nudged, parameters, self._eps, is_exact=not self._on_gpus)
        rows: dict[str, list[Cell]] = {"single": cells(one, one, comparison)}
        found = {"single": list(causes.of_one(one, comparison))}
        for way in self.ways[1:]:
            measured = self._measure(way)
            rows[way.name] = cells(one, measured, comparison)
            found[way.name] = list(self._causes(measured, rows[way.name], comparison, found["single"]))
        return table.Found(rows, found, self._cfg.check.steps, self._cfg.check.devices)

    def _causes(self, way: Measured, row: list[Cell], comparison: Comparison, of_one: list[Cause]) -> Iterator[Cause]:
        """Yield why a way differs from one process, from runs that write down all of their moments."""
        if way.whole.code and not way.whole.is_refused:
            yield causes.of_failure(way)
        if of_one or not any(cell.status == "differs" and cell.promise in DIAGNOSED for cell in row):
            return  # what one process does not do twice, no other way does
        log.info("looks for  the cause under %s", way.way.name)
        evidence = Evidence(self._one_by_moments, self._cut_as(way.way), self._by_moments(way.way, "moments"))
        yield causes.of_difference(evidence, comparison, way.states["whole"])

    @functools.cached_property
    def _one_by_moments(self) -> list[dict[str, Any]]:
        return self._by_moments(self.single, "moments")

    def _cut_as(self, way: Way) -> list[dict[str, Any]]:
        """Return the moments of one process that takes the micro batches of a way; none where they are its own."""
        cfg = self._cfg
        asked = cfg.micro_batch_size if isinstance(cfg.micro_batch_size, int) else None
        micro, own = (BatchPlan.derive(cfg.global_batch_size, asked, n).micro_batch for n in (way.ranks, 1))
        if micro == own:
            return []
        return self._by_moments(self.single, f"moments_{way.name}", f"micro_batch_size={micro}")

    def _by_moments(self, way: Way, name: str, *words: str) -> list[dict[str, Any]]:
        return self.start(way, name, words=words, every_moment=True).moments

    def _measure(self, way: Way) -> Measured:
        log.info("checks     %s, %d device%s", way.name, way.ranks, "s" if way.ranks > 1 else "")
        return measure(self.start, self._starter, way, self._cfg.check.steps, self.single)

    @property
    def _eps(self) -> float:
        return next((eps for begin, eps in _EPS.items() if self._precision.startswith(begin)), _EPS_32)

    def start(
        self, way: Way, name: str, resume: Path | None = None, words: tuple[str, ...] = (), **probe: Any
    ) -> Ended:
        """Start a run of a way (see `measure.Start`).

        Args:
            words: further overrides.
        """
        folder = self._folder / way.name / name
        of_run = {
            "mode": "fit",
            "run_id": "check",
            "trainer.num_nodes": 1,
            "trainer.devices": way.ranks,
            "trainer.log_every_n_steps": 1,
            "trainer.num_sanity_val_steps": 0,
            "trainer.limit_test_batches": 0,
            "callbacks.check_probe._target_": "lightswitch.checking.probe.Probe",
            "callbacks.check_probe.folder": f"'{folder}'",
            "callbacks.check_probe.steps": self._cfg.check.steps,
            **{f"callbacks.check_probe.{key}": value for key, value in probe.items()},
            **self._checkpoints(),
            **({"micro_batch_size": "null"} if self._cfg.micro_batch_size == AUTO else {}),
            **({} if resume is None else {"resume": f"'{resume}'"}),
            **({} if self._on_gpus else {"trainer.accelerator": "cpu"}),
        }
        return self._starter.run(
            folder, [*self._typed, *way.words, *(f"{key}={value}" for key, value in of_run.items()), *words], way.ranks
        )

    def _checkpoints(self) -> dict[str, object]:
        """Return what lets a run save one after half of its steps, by the callback that the config has, or one more."""
        every = max(1, self._cfg.check.steps // 2)
        for name, node in (self._cfg.get("callbacks") or {}).items():
            if str((node or {}).get("_target_")).endswith(".LastCheckpoints"):
                return {f"callbacks.{name}.every_n_steps": every}
        return {
            "callbacks.check_saves._target_": "lightswitch.checkpoints.last.LastCheckpoints",
            "callbacks.check_saves.folder": "'${hydra:runtime.output_dir}/checkpoints'",
            "callbacks.check_saves.every_n_steps": every,
        }

    def _ways(self) -> Iterator[Way]:
        """Yield the strategies to check beside one process."""
        asked, chosen = self._cfg.check.strategies, str(self._run.hydra.runtime.choices.get("strategy"))
        nodes = dict(self._nodes())
        if asked is None and chosen in nodes:
            details = commands.overrides_below("trainer.strategy")
            yield Way(chosen, (f"strategy={chosen}", *details), self._cfg.check.devices)
            return
        named = list(nodes) if asked == "all" else [asked] if isinstance(asked, str) else asked
        if named is None:
            named = [name for name, node in nodes.items() if not (_is_zero(node) or node.get("cpu_offload"))]
        for name in map(str, named):
            yield Way(name, (f"strategy={name}",), self._cfg.check.devices)

    def _nodes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the strategies of the config folders that several devices train under, each in one way to start it."""
        for name, path in groups.files(self._run.hydra, "strategy").items():
            node: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            node = node.get("strategy")
            if not isinstance(node, dict) or "???" in node.values() or not node.keys().isdisjoint(_ALIKE):
                continue
            target = str(node.get("_target_"))
            has_code = find_spec("deepspeed" if _is_zero(node) else target.rpartition(".")[0]) is not None
            if has_code and not target.endswith((".Single", ".auto")):
                yield name, node

    def _preloaded(self) -> list[str]:
        """Return what the server of processes imports; on GPUs nothing of the user's, which may begin to use them."""
        named = {way.name for way in self.ways}
        nodes = [node for name, node in self._nodes() if name in named]
        if not self._on_gpus:
            nodes += [self._cfg.get("model") or {}, self._cfg.get("data") or {}]
        targets = [str(node.get("_target_", "")).rpartition(".")[0] for node in nodes]
        return [*(f"lightswitch.launch.{name}" for name in _MODULES), *(name for name in targets if name)]

    def _refuse(self, one: Ended) -> NoReturn:
        """Say that the module does not train in one process, where nothing of a strategy is in its way.

        Raises:
            Refused: always.
        """
        name = str(self._cfg.model.get("_target_"))
        if one.is_refused:
            raise RefusedRequest([one.problem])
        if one.code == 0:
            raise Refused(f"{name} took no step in one process; give it data of at least one global batch")
        if not self._on_gpus and NEEDS_GPU.search(one.output):
            raise Refused(
                f"{name} needs a GPU, and this machine has fewer than check.devices={self._cfg.check.devices}: "
                f"{one.problem}; check it on a machine that has them"
            )
        print(one.traceback or one.output, file=sys.stderr)
        log.error("%s fails in one process, before any strategy is tried: %s", name, one.problem)
        raise RunEnded(ExitCode.FAILED)


def _is_zero(node: Mapping[str, Any]) -> bool:
    return str(node.get("_target_")).endswith(".DeepSpeed")
