"""Keys that the installed DeepSpeed reads from its config, found in its source: no torch is imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

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
_OF_FILES = {  # blocks whose keys are those that a file reads
    "activation_checkpointing": "runtime/activation_checkpointing/config.py",
    "aio": "runtime/swap_tensor/aio_config.py",
    "flops_profiler": "profiling/config.py",
}


@functools.cache
def of_block(path: str) -> frozenset[str] | None:
    """Return the keys of a block, such as "zero_optimization.offload_param"; of the whole config for "".

    None where the source does not tell.
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
    except OSError:  # another version, with other files
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
    """Yield the keys that a file reads from a block of the config ("" is the whole); for None, from any dict."""
    constants = _constants(file)
    for node in ast.walk(_tree(file)):
        for owner, key in _lookups(node):
            name = key.value if isinstance(key, ast.Constant) else constants.get(ast.unparse(key))
            if isinstance(name, str) and block in (None, _block(owner, constants)):
                yield name
    if block == "":  # handed to a function as defaults of its arguments
        yield from (name for constant, name in constants.items() if constant.endswith("COMMUNICATION_DATA_TYPE"))


def _lookups(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (dict, key) of `get_scalar_param(dict, key, …)`, `dict.get(key)`, `dict[key]`, `key in dict`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_scalar_param":
        yield node.args[0], node.args[1]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        yield node.func.value, node.args[0]
    elif isinstance(node, ast.Subscript):
        yield node.value, node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
        yield node.comparators[0], node.left


def _block(owner: ast.expr, constants: dict[str, str]) -> str | None:
    """Return "" for `param_dict`, "name" for `param_dict[NAME]`."""
    text = ast.unparse(owner).removesuffix(".keys()")
    if text == "param_dict":
        return ""
    return constants.get(text.removeprefix("param_dict[").removesuffix("]"))


@functools.cache
def _constants(file: str) -> dict[str, str]:
    """Return the string constants of a file and of the constants.py beside it, by name."""
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
