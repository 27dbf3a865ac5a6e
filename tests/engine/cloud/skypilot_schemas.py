"""Prints SkyPilot's schemas of a task and of its resources as JSON, from an unpacked wheel without what it requires.

python -m tests.engine.cloud.skypilot_schemas FOLDER VERSION
"""

import ast
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def main(folder: Path, version: str) -> None:
    package = ModuleType("sky")  # whose own __init__ imports every cloud's client
    package.__path__ = [str(folder / "sky")]
    vars(package).update(__version__=version, __commit__="")
    sys.modules["sky"] = package
    # the schemas ask this module for an enumeration, and it imports most of SkyPilot beside
    tree = ast.parse((folder / "sky/skylet/autostop_lib.py").read_text())
    tree.body = [node for node in tree.body if _is_enumeration(node)]
    names = {**vars(import_module("typing")), "enum": import_module("enum")}
    exec(compile(tree, "autostop_lib", "exec"), names)
    autostop = sys.modules["sky.skylet.autostop_lib"] = ModuleType("sky.skylet.autostop_lib")
    vars(autostop).update(names)
    import_module("sky.skylet").autostop_lib = autostop  # type: ignore[attr-defined]
    schemas = import_module("sky.utils.schemas")
    vars(schemas)["_task_config_schema"] = dict  # of the key `config`, which needs the server; cloud/ has none
    print(json.dumps({"task": schemas.get_task_schema(), "resources": schemas.get_resources_schema()}))


def _is_enumeration(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
