"""What train.py answers to mistaken command lines, each in a process forked before torch is imported."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

TRAIN = Path(__file__).parents[3] / "train.py"


@dataclass(frozen=True)
class Answer:
    returncode: int
    out: str
    err: str
    imported: list[str]  # of torch and lightning
    left: list[str]  # what is left in the working directory


def answers(commands: dict[str, list[str]], folder: Path) -> dict[str, Answer]:
    """One answer a command, by its name. As in a shell, a command may begin with variables: `RANK=0`, in capitals."""
    (folder / "commands.json").write_text(json.dumps(commands))
    subprocess.run([sys.executable, "-m", "tests.engine.config.mistaken", str(folder)], cwd=TRAIN.parent, check=True)
    return {name: _read(folder / str(number)) for number, name in enumerate(commands)}


def _read(told: Path) -> Answer:
    left = sorted(str(path.relative_to(told / "cwd")) for path in (told / "cwd").rglob("*"))
    ended = json.loads((told / "ended.json").read_text())
    return Answer(out=(told / "out").read_text(), err=(told / "err").read_text(), left=left, **ended)


def _answer(arguments: list[str], told: Path) -> None:
    (told / "cwd").mkdir(parents=True)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(told / name, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(told / "cwd")
    while arguments and re.match("[A-Z_]+=", arguments[0]):
        name, _, value = arguments.pop(0).partition("=")
        os.environ[name] = value
    sys.argv = [str(TRAIN), *arguments]
    code: object = 0
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    imported = sorted({"torch", "lightning"} & sys.modules.keys())
    (told / "ended.json").write_text(json.dumps({"returncode": code or 0, "imported": imported}))
    sys.stdout.flush()
    os._exit(0)


def main(folder: Path) -> None:
    import gc

    from hydra import compose, initialize_config_dir

    import lightswitch.launch.hydra_entry
    import lightswitch.preflight.check  # noqa: F401  # once, for all that are forked
    from lightswitch.preflight.signatures import signature

    signature("lightning.pytorch.Trainer")  # its source is read once for all
    with initialize_config_dir(str(TRAIN.with_name("conf")), version_base="1.3"):
        compose("config", ["trainer.max_steps=3", "+trainer.list=[1]"], return_hydra_config=True)  # and Hydra's grammar
    gc.freeze()  # no child looks at what all have
    children: list[int] = []
    for number, arguments in enumerate(json.loads((folder / "commands.json").read_text()).values()):
        if len(children) == 2:
            os.waitpid(children.pop(0), 0)
        children.append(os.fork())
        if not children[-1]:
            _answer(arguments, folder / str(number))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
