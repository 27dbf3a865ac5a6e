"""DeepSpeed configs: checks, and values of the run filled into a user's config. Imports no torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightswitch.errors import nearest

_AUTO = "auto"
_SOURCES = {"gradient_clipping": "trainer.gradient_clip_val"}
_DECIDED_ELSEWHERE = {  # keys that a run decides in another way
    "optimizer": "the model's configure_optimizers makes the optimizer",
    "scheduler": "the model's configure_optimizers makes the scheduler",
    "torch_autocast": "the run's precision switches it on",
}
_SWITCHES = ("fp16", "bf16")
NO_DISK = "checkpoints do not support offloading to disk"
_KEYS = {  # at the top of a config; DeepSpeed's own classes check the keys within blocks
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "fp16", "bf16",
    "communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor",
    "activation_checkpointing", "aio", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor",
    "comet", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Values of a run that its DeepSpeed config must match.

    Attributes:
        precision: name of the run's precision.
        micro_batch: samples that a device processes at once.
        accumulation: micro-batches of a step.
        replicas: number of data-parallel ranks; every device is one.
        clip_norm: maximum norm of the gradient; 0 for no clipping.
    """

    precision: str
    micro_batch: int
    accumulation: int
    replicas: int
    clip_norm: float

    @property
    def values(self) -> dict[str, float]:
        """Values that the run decides, by config key."""
        return {
            "train_batch_size": self.micro_batch * self.accumulation * self.replicas,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip_norm,
        }


def read(path: str | Path) -> dict[str, Any]:
    """Return a DeepSpeed config from a file.

    Raises:
        ValueError: the file is not a JSON object.
        OSError: the file can't be read.
    """
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"found a {type(found).__name__}, expected an object, {{…}}")
    return found


# Problems


def problems(config: dict[str, Any], run: Run | None) -> Iterator[str]:
    """Yield one line for each key that is unknown, conflicts with the run or would be ignored.

    Args:
        run: None if its batch can't be divided, which is reported elsewhere.
    """
    unknown = [key for key in config if key not in {*_KEYS, *_DECIDED_ELSEWHERE}]
    for key in unknown:
        yield f"{key} is not a key of DeepSpeed's that a run supports; leave it out.{nearest(key, _KEYS)}"
    yield from (
        f"{key} is not supported: {why}; leave it out" for key, why in _DECIDED_ELSEWHERE.items() if key in config
    )
    if not unknown:  # a misspelt key may have been meant to set the stage
        yield from _stage(config.get("zero_optimization"))
    if run is not None:
        yield from _against_run(config, run)


def _stage(zero: Any) -> Iterator[str]:
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        yield f"zero_optimization.stage is {stage}, which shards nothing; use 1, 2 or 3, or strategy=ddp"
    elif stage < 3 and zero.get("offload_param"):
        yield f"zero_optimization.offload_param is ignored at stage {stage}; use stage 3, or leave it out"
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero, dict) and isinstance(block := zero.get(key), dict) and block.get("device") == "nvme":
            yield f"zero_optimization.{key}.device=nvme: {NO_DISK}; use cpu, or more devices"


def _against_run(config: dict[str, Any], run: Run) -> Iterator[str]:
    for key, expected in run.values.items():
        found = config.get(key, _AUTO)
        if found not in (_AUTO, expected):
            source = _SOURCES.get(key, "global_batch_size and micro_batch_size")
            yield f'{key} is {found}, but the run has {expected:g} from {source}; set that, and "auto" here'
    for key, begin in (("fp16", "16"), ("bf16", "bf16")):
        enabled = (config.get(key) or {}).get("enabled", _AUTO)
        is_needed = key in precision_blocks(config, run.precision)
        if (enabled is True and not run.precision.startswith(begin)) or (enabled is False and is_needed):
            found = f"{key}.enabled is {str(enabled).lower()}"
            yield f'{found}, but the run has precision={run.precision}; use "auto", or another precision'


# The completed config


def resolved(config: dict[str, Any], run: Run) -> dict[str, Any]:
    """Return the config to pass to DeepSpeed.

    Values that the run decides are filled in; any other "auto" is removed, so DeepSpeed's default applies.
    """
    full = _without_auto(copy.deepcopy(config))
    full.update(run.values)
    full.setdefault("zero_allow_untested_optimizer", True)  # a test after a fit needs it at stage 3
    full.setdefault("zero_force_ds_cpu_optimizer", False)  # torch's optimizers need nothing compiled
    blocks = precision_blocks(full, run.precision)
    for name in (*_SWITCHES, "torch_autocast"):
        if name in full or name in blocks:
            full[name] = {"enabled": False, **blocks.get(name, {}), **full.get(name, {})}
    return full


def precision_blocks(config: dict[str, Any], precision: str) -> dict[str, dict[str, Any]]:
    """Return the blocks that give a precision the same meaning as under other strategies, if DeepSpeed supports it.

    bf16-mixed is autocast over 32-bit weights: DeepSpeed's "mixed" stores the weights themselves in 16 bits. Its
    autocast in float16 clips gradients before they are unscaled (0.19), so 16-mixed uses DeepSpeed's fp16 instead.
    """
    if precision == "bf16-mixed" and (config.get("bf16") or {}).get("enabled") is not True:
        # without "safe" modules, gradients are reduced, and weights gathered, in 32 bits
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}}
    if precision == "bf16-true" and not (config.get("zero_optimization") or {}).get("offload_optimizer"):
        # no 32-bit copies, and no skipped steps
        all_in_16_bits = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        return {"bf16": {"enabled": True, "check_grad_overflow": False, **all_in_16_bits}}
    if precision.startswith("bf16"):
        return {"bf16": {"enabled": True}}
    if precision.startswith("16"):
        return {"fp16": {"enabled": True}}
    return {}


def of_any_run(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without values that a run decides, for DeepSpeed to check the others."""
    decided = {"train_batch_size", "gradient_accumulation_steps", "gradient_clipping"}
    others = {key: value for key, value in config.items() if key not in decided}
    return {**_without_auto(others), "train_micro_batch_size_per_gpu": 1}


def _without_auto(node: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in node.items() if value != _AUTO}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}
