"""What a process knows is handed down: not kept in modules, in environment variables, or in text to be parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.engine.test_layout import ENGINE, _tree

MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = (
    "list",
    "dict",
    "set",
    "defaultdict",
    "deque",
    "Counter",
    "Event",
    "Lock",
    "Queue",
    "ExitStack",
    "local",
)
CHANGING = ("append", "extend", "add", "update", "pop", "popitem", "clear", "remove", "discard", "insert", "setdefault")
CHANGING += ("set", "put", "push", "enter_context", "callback")
# The environment is how other people's code is told something: who reads each variable that the engine sets
READ_BY_OTHERS = {
    "OMP_WAIT_POLICY": "OpenMP",
    "KINETO_LOG_LEVEL": "Kineto, of torch's profiler",
    "HYDRA_FULL_ERROR": "Hydra",
    "PYTHONHASHSEED": "Python",
    "MASTER_ADDR": "torch, for env://",
    "MASTER_PORT": "torch, for env://",
    "WORLD_SIZE": "torch, for env://",
    "RANK": "modules written for torchrun",
    "LOCAL_WORLD_SIZE": "modules written for torchrun",
    "NODE_RANK": "Lightning's LightningEnvironment, in ranks that are started by script",
    "LOCAL_RANK": "Lightning's LightningEnvironment, and DeepSpeed",
    "TORCHELASTIC_USE_AGENT_STORE": "torch, for env://",
    "SLURM_NNODES": "Lightning's SLURMEnvironment",
    "SLURM_NTASKS_PER_NODE": "Lightning's SLURMEnvironment",
    "DS_ACCELERATOR": "DeepSpeed",
}


def _module_state(tree: ast.Module) -> Iterator[str]:
    """Names of variables of a module that its functions change."""
    mutable = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_mutable(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from node.names
            yield from mutable & set(_changed_by(node))


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in MUTABLE_CALLS
    return isinstance(value, MUTABLE)


def _changed_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        yield from _names(node.func.value)
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield from _names(node.value)


def _names(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id


def test_no_variable_of_a_module_changes_after_import() -> None:
    assert {(module, name) for module, path in ENGINE.items() for name in _module_state(_tree(path))} == set()


@pytest.mark.parametrize(
    "code",
    [
        "count = 0\ndef f():\n    global count\n    count = 1",
        "seen: set[str] = set()\ndef f():\n    seen.add('a')",
        "found = {}\ndef f():\n    found['a'] = 1",
        "done = threading.Event()\nclass A:\n    def f(self):\n        done.set()",
    ],
)
def test_such_a_variable_would_be_seen(code: str) -> None:
    assert list(_module_state(ast.parse(code)))


def test_a_cached_function_tells_nobody_anything() -> None:
    """One that is cached so that it speaks once is a variable of its module, too."""
    for function in (node for path in ENGINE.values() for node in ast.walk(_tree(path))):
        if isinstance(function, ast.FunctionDef) and any("cache" in ast.dump(one) for one in function.decorator_list):
            assert function.returns is not None, function.name
            assert ast.unparse(function.returns) != "None", function.name


def test_no_environment_variable_is_the_engines_own() -> None:
    for module, path in ENGINE.items():
        constants = [node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant)]
        assert not [text for text in constants if isinstance(text, str) and text.startswith("LIGHTSWITCH_")], module
        assert set(_variables_set(_tree(path))) <= READ_BY_OTHERS.keys(), module


def _variables_set(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_environ(node.value):
            yield ast.literal_eval(node.slice)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
            if node.func.attr == "setdefault":
                yield ast.literal_eval(node.args[0])
            if node.func.attr == "update":
                assert not node.args, "name the variables, so that this test can read them"
                yield from (str(keyword.arg) for keyword in node.keywords)


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) == "os.environ"


def test_no_part_reads_what_another_prints() -> None:
    """What other people's programs print is read by `capture_output`."""
    assert [module for module, path in ENGINE.items() if "subprocess.PIPE" in path.read_text()] == []
