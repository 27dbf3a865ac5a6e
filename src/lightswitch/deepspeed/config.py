"""DeepSpeed configs and operators: checks, and values of the run filled into a user's config. Imports no torch."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import json
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightswitch.errors import nearest

_AUTO = "auto"
_CLIPPING = "trainer.gradient_clip_val"
_DECIDED_ELSEWHERE = {  # keys that DeepSpeed accepts, for things that the run does in another way or not at all
    "optimizer": "the model's configure_optimizers makes the optimizer",
    "scheduler": "the model's configure_optimizers makes the scheduler",
    "autotuning": "it starts separate runs",
    "checkpoint": "checkpoints are written in another format",
    "data_efficiency": "the engine orders the samples",
    "data_parallel_size": "every device is a replica",
    "dataloader_drop_last": "the data module sets it",
    "elasticity": "the batch follows global_batch_size",
    "expert_parallel": "every device is a replica",
    "gradient_allreduce_op": "gradients are averaged",
    "hybrid_engine": "the run only trains",
    "managed_gradient_accumulation": "the run sets gradient_accumulation_steps",
    "pipeline": "the model is not a pipeline",
    "sequence_parallel_size": "every device is a replica",
    "tensor_parallel": "every device is a replica; use strategy=fsdp_tp",
}
_SWITCHES = ("fp16", "bf16", "torch_autocast")
_TOP = "runtime/config.py"
_OF_CLASSES = {  # blocks whose keys are the fields of a class
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
}
_OF_FILES = {  # blocks whose keys are all keys that a file reads
    "activation_checkpointing": "runtime/activation_checkpointing/config.py",
    "aio": "runtime/swap_tensor/aio_config.py",
    "flops_profiler": "profiling/config.py",
}


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
    unknown = list(_unknown(config, ""))
    yield from unknown
    yield from (
        f"{key} is not supported: {why}; leave it out" for key, why in _DECIDED_ELSEWHERE.items() if key in config
    )
    if not unknown:  # a misspelt key may have been meant to set the stage
        yield from _stage(config.get("zero_optimization"))
    if run is not None:
        yield from _against_run(config, run)


def _unknown(node: dict[str, Any], path: str) -> Iterator[str]:
    known = keys_of_block(path)
    for key, value in node.items():
        full_key = f"{path}.{key}".lstrip(".")
        if known is not None and key not in known and full_key not in _DECIDED_ELSEWHERE:
            yield f"{full_key}: DeepSpeed has no such key.{nearest(key, known)}"
        elif isinstance(value, dict):
            yield from _unknown(value, full_key)


def _stage(zero: Any) -> Iterator[str]:
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        yield f"zero_optimization.stage is {stage}, which shards nothing; use 1, 2 or 3, or strategy=ddp"
    elif stage < 3 and blocks_on_disk(zero):
        yield f"DeepSpeed offloads to NVMe at stage 3 alone, but zero_optimization.stage is {stage}; use 3"
    elif stage < 3 and zero.get("offload_param"):
        yield f"zero_optimization.offload_param is ignored at stage {stage}; use stage 3, or leave it out"


def blocks_on_disk(zero: Any) -> list[dict[str, Any]]:
    """Return the blocks of `zero_optimization` that offload to disk."""
    named = [zero.get(key) for key in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
    return [block for block in named if isinstance(block, dict) and block.get("device") == "nvme"]


def _against_run(config: dict[str, Any], run: Run) -> Iterator[str]:
    for key, expected in run.values.items():
        found = config.get(key, _AUTO)
        if found in (_AUTO, expected):
            continue
        if key == "gradient_clipping":
            instead = f"type {_CLIPPING}={found}" + (f', or use "auto" to clip by {expected:g}' if expected else "")
            yield f"{key} is {found}, but the run has {expected:g} from {_CLIPPING}; {instead}"
        else:
            source = "global_batch_size and micro_batch_size"
            yield f'{key} is {found}, but the run has {expected:g} from {source}; use "auto"'
    allowed = {"16": {"fp16"}, "bf16-mixed": {"bf16", "torch_autocast"}, "bf16-true": {"bf16"}}
    for key in _SWITCHES:
        enabled = (config.get(key) or {}).get("enabled", _AUTO)
        fits = key in next((blocks for name, blocks in allowed.items() if run.precision.startswith(name)), set())
        if enabled is True and not fits:
            yield f'{key}.enabled is true, but the run has precision={run.precision}; use "auto", or another precision'
        if enabled is False and key in precision_blocks(config, run.precision) and run.precision != "bf16-mixed":
            yield f'{key}.enabled is false, but the run has precision={run.precision}; use "auto", or another precision'


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
    for name in _SWITCHES:
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


def differences(config: dict[str, Any], full: dict[str, Any], precision: str) -> Iterator[str]:
    """Yield warnings: a precision that differs from other strategies', and each "auto" left to DeepSpeed's default.

    Args:
        full: the result of `resolved` for ``config``.
    """
    kind = next((name for name in ("fp16", "bf16") if full.get(name, {}).get("enabled")), None)
    if kind and precision.endswith("mixed"):
        yield f"DeepSpeed's {kind} stores the weights in 16 bits, and 32-bit copies for the optimizer"
    elif kind and not full[kind].get("bf16_master_weights_and_grads"):
        yield f"DeepSpeed's {kind} stores 32-bit copies of the weights for the optimizer: more precise than {precision}"
    left = [key for key in _autos(config) if key not in full and key.partition(".")[0] not in _SWITCHES]
    if left:
        yield f'"auto" of {", ".join(left)} is DeepSpeed\'s default: nothing in the run tells a better value'


def _autos(node: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in node.items():
        if value == _AUTO:
            yield f"{path}{key}"
        elif isinstance(value, dict):
            yield from _autos(value, f"{path}{key}.")


def _without_auto(node: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in node.items() if value != _AUTO}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


@functools.cache
def keys_of_block(path: str) -> frozenset[str] | None:
    """Return the keys of a block, such as "zero_optimization.offload_param", or of the whole config for "".

    Return None if DeepSpeed's source does not show them.
    """
    try:
        if path in _OF_CLASSES:
            return frozenset(_fields(*_OF_CLASSES[path])) or None
        if path in _OF_FILES:
            return frozenset(_read(_OF_FILES[path], None)) or None
        if path == "torch_autocast":
            return frozenset(_read(_TOP, path)) or None
        blocks = {name for name in (*_OF_CLASSES, *_OF_FILES) if "." not in name}
        return frozenset(_read(_TOP, "")) | blocks if path == "" else None
    except OSError:  # DeepSpeed is another version with other files, or not installed
        return None


def _fields(file: str, name: str) -> Iterator[str]:
    """Yield the fields of a pydantic model, and their aliases."""
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for field in (item for item in node.body if isinstance(item, ast.AnnAssign)):
            yield ast.unparse(field.target)
            keywords = field.value.keywords if isinstance(field.value, ast.Call) else []
            yield from (str(ast.literal_eval(keyword.value)) for keyword in keywords if keyword.arg == "alias")


def _read(file: str, block: str | None) -> Iterator[str]:
    """Yield the keys that a file reads from a block of the config: "" for the whole config, None for any dict."""
    constants = _constants(file)
    for node in ast.walk(_tree(file)):
        for owner, key in _lookups(node):
            name = key.value if isinstance(key, ast.Constant) else constants.get(ast.unparse(key))
            if isinstance(name, str) and block in (None, _block(owner, constants)):
                yield name
    if block == "":  # read by a function whose default arguments are the keys
        yield from (name for constant, name in constants.items() if constant.endswith("COMMUNICATION_DATA_TYPE"))


def _lookups(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (dict, key) for `get_scalar_param(dict, key, …)`, `dict.get(key)`, `dict[key]` and `key in dict`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_scalar_param":
        yield node.args[0], node.args[1]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        yield node.func.value, node.args[0]
    elif isinstance(node, ast.Subscript):
        yield node.value, node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
        yield node.comparators[0], node.left


def _block(owner: ast.expr, constants: dict[str, str]) -> str | None:
    """Return "" for `param_dict`, and "name" for `param_dict[NAME]`, given the constant NAME = "name"."""
    text = ast.unparse(owner).removesuffix(".keys()")
    if text == "param_dict":
        return ""
    return constants.get(text.removeprefix("param_dict[").removesuffix("]"))


@functools.cache
def _constants(file: str) -> dict[str, str]:
    """Return the string constants, by name, of a file, the constants.py beside it and runtime/constants.py."""
    found: dict[str, str] = {}
    for path in (str(Path(file).with_name("constants.py")), "runtime/constants.py", file):
        if not (_root() / path).exists():
            continue
        for node in _tree(path).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found.update({ast.unparse(target): node.value.value for target in node.targets})
    return found


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((_root() / file).read_text(encoding="utf-8"))


def _root() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    return Path(spec.origin or "").parent if spec else Path("deepspeed is not installed")


_BUILDERS = {"async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder"}
_LOADING_SECONDS = 15.0  # how long a start holds the lock of an operator that is built


def operator_problems(op: str, purpose: str) -> Iterator[str]:
    """Yield why a run that needs an operator can't start: the operator is not built, or its build has a lock file.

    Runs do not build operators, because each process would build silently for minutes, and wait silently for the lock
    file of a build that was killed.

    Args:
        op: DeepSpeed's name of the operator: async_io, cpu_adam or fused_adam.
        purpose: what needs the operator; the message begins with it.
    """
    needs = f"{purpose} needs DeepSpeed's {op}"
    folders = list(_folders(op))
    locks = [path / "lock" for path in (*folders, *_folders("pin_memory")) if path.name in (op, "pin_memory")]
    until = time.monotonic() + _LOADING_SECONDS
    while held := [lock for lock in locks if lock.exists()]:
        if time.monotonic() > until:
            yield (
                f"{needs}, and {held[0]} says that it is being built; wait, or, if no process builds it, type "
                f"rm {held[0]}"
            )
            return
        time.sleep(0.1)
    tools = _missing_tools(op)
    installed = f"apt-get install {' '.join(tools)}"
    if not any(path.glob(f"{op}*.so") for path in folders):
        yield (
            f"{needs}, which is not built here; {f'type {installed}, and ' if tools else ''}build it once, which takes "
            f"minutes: python -c 'from deepspeed.ops.op_builder import {_BUILDERS[op]} as B; B().load()'"
        )
    elif tools:
        yield f"{needs}, and each start looks whether it is up to date, which needs {' and '.join(tools)}; {installed}"


def _missing_tools(op: str) -> list[str]:
    """Return the Debian packages that building an operator needs and this machine lacks."""
    compiler = os.environ.get("CXX", "c++")
    lacks = {
        "g++": shutil.which(compiler) is None,
        "ninja-build": shutil.which("ninja") is None,
        "python3-dev": not Path(sysconfig.get_path("include"), "Python.h").exists(),
        "libaio-dev": op == "async_io" and not _has_header("libaio.h"),
    }
    return [package for package, is_missing in lacks.items() if is_missing]


def _has_header(name: str) -> bool:
    places = [*os.environ.get("CPATH", "").split(os.pathsep), "/usr/include", "/usr/local/include"]
    own = "CFLAGS" in os.environ or "CPLUS_INCLUDE_PATH" in os.environ  # as DeepSpeed takes libaio from elsewhere
    return own or any(Path(place, name).exists() for place in places if place)


def _folders(op: str) -> Iterator[Path]:
    """Yield the folders of an operator in torch's extension cache and in the installed DeepSpeed package."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = (
        Path(cache)
        if cache
        else Path(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "torch_extensions")
    )
    yield from (path for path in (root / op, *root.glob(f"*/{op}")) if path.is_dir())
    spec = importlib.util.find_spec("deepspeed")
    if spec is not None and spec.origin:
        yield from (path.parent for path in Path(spec.origin).parent.glob(f"ops/**/{op}*.so"))
