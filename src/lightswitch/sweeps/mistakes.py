"""Mistakes in what was typed for a sweep that each of its jobs would repeat: they are told once, before the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightswitch.config import moved
from lightswitch.config.confidential import Cleaner
from lightswitch.config.overrides import typed_overrides
from lightswitch.preflight import check, unread

_SWEEPERS = ("BasicSweeper", "OptunaSweeper")  # whose jobs are what was typed and hydra.sweeper.params
_SAMPLES = ("search_space", "custom_search_space")  # of OptunaSweeper, beside those

Compose = Callable[[list[str]], DictConfig]


def of_all_jobs(cfg: DictConfig, compose: Compose) -> list[str]:
    """Return the problems that all jobs of a sweep have.

    They are looked for in as few jobs as that takes: the first of all values, and, while it has problems that the
    others had too, one with each other value. Where a job can't be composed the sweep itself tells so.

    Args:
        cfg: of the sweep.
        compose: returns the config of a job from its overrides.
    """
    sweeper = cfg.hydra.sweeper
    if not str(sweeper._target_).endswith(_SWEEPERS) or any(sweeper.get(key) for key in _SAMPLES):
        return []
    shared: list[str] | None = None
    try:
        for overrides in _jobs(cfg):
            found = _problems(compose(overrides))
            shared = found if shared is None else [problem for problem in shared if problem in found]
            if not shared:
                break
    except (HydraException, OmegaConfBaseException):
        return []
    return shared or []


def _jobs(cfg: DictConfig) -> Iterator[list[str]]:
    """Yield overrides of jobs that have all values between them: the first of each, then another of one."""
    params = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *typed_overrides(cfg.hydra)])
    values = {override.get_key_element(): _values(override) for override in parsed}  # what was typed replaces params
    first = {key: among[0] for key, among in values.items()}
    yield [*first.values()]
    for key, among in values.items():
        for other in among[1:]:
            yield [*{**first, key: other}.values()]


def _values(override: Override) -> list[str]:
    """Return an override with each of its values; of numbers with two, as others are as good or as bad."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    swept, values = override.value(), list[Any]()
    if isinstance(swept, IntervalSweep | RangeSweep):
        values = [swept.start, swept.end if isinstance(swept, IntervalSweep) else swept.stop]
    else:
        values = [*override.sweep_string_iterator()]
        if all(type(value) in (int, float) for value in override.sweep_iterator()):
            values = [values[0], values[-1]]
    return [f"{override.get_key_element()}={value}" for value in dict.fromkeys(values)]


def _problems(job: DictConfig) -> list[str]:
    place = {"job.num": 0, "job.id": "0", "runtime.output_dir": str(job.hydra.sweep.dir)}  # as a launcher gives it
    for key, value in place.items():
        OmegaConf.update(job, f"hydra.{key}", value, force_add=True)
    HydraConfig.instance().set_config(job)
    hydra, cleaner = job.hydra, Cleaner.of(job)
    with open_dict(job):
        del job["hydra"]
    moved.replace(job)
    plain: Any = OmegaConf.to_container(job, resolve=True)
    told = check.typed_problems(plain, hydra) or list(unread.problems(job, hydra))
    problems: list[str] = cleaner.cleaned(told)
    return problems
