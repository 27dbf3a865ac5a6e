"""The pictures of the documents: real runs, as a browser shows them, and the drawings.

python -m tests.engine.tables.pictures          # all of docs/images; about ten minutes, and Chromium
python -m tests.engine.tables.pictures drawings plan
python -m tests.engine.tables.pictures tensorboard comparison --runs runs/gpt  # of runs that are there already
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

from tests.engine.conftest import CHECKOUT
from tests.engine.tables import drawings
from tests.engine.tables.browser import DARK, LIGHT, Browser
from tests.engine.tables.drawings import FOLDER

SHORT = ("trainer.max_steps=300", "trainer.val_check_interval=100", "trainer.log_every_n_steps=5", "compare=true")
RUNS = {  # as docs/comparison.md has them, cut short
    "single": ("strategy=single",),
    "ddp": ("strategy=ddp", "trainer.devices=2"),
    "fsdp": ("strategy=fsdp", "trainer.devices=2"),
}
PLAN = ("mode=plan", "model=gpt2_large", "data=text", f"data.files=['{CHECKOUT}/CHANGELOG.md']", "precision=bf16-mixed")
PLAN += ("trainer.devices=8", "plan.device=rtx_4090")
SCALING = ("-m", "mode=dry_run", "model=gpt2", "data=python_source", "precision=bf16-mixed", "strategy=fsdp")
SCALING += ("trainer.num_nodes=1,4,16,64", "trainer.devices=8", "plan.device=h100", "global_batch_size=1024")
SCALING += ("micro_batch_size=2", "trainer.limit_val_batches=0", "run_id=grid")
TAGS = {"tagFilter": "train/loss|val/loss", "smoothing": "0"}
DRAWN = "document.querySelectorAll('line-chart canvas, line-chart svg path').length > 1"
WHOLE_CURVES = """[...document.querySelectorAll('mat-checkbox')]
  .find(one => one.innerText.startsWith('Ignore outliers')).querySelector('input').click()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; all without any")
    parser.add_argument("--runs", type=Path, help="a folder of finished runs; without it some are made")
    given = parser.parse_args()
    if unknown := set(given.names) - PICTURES.keys():
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of: {', '.join(PICTURES)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names or PICTURES:
            PICTURES[name](Path(folder), given.runs)


def of_drawings(_: Path, __: Path | None) -> None:
    drawings.main()


def of_tensorboard(folder: Path, runs: Path | None) -> None:
    """Show the losses of finished runs in TensorBoard."""
    with _tensorboard(runs or _runs(folder)) as address, Browser(1000, 590) as browser:
        for scheme, path in _both("tensorboard.webp"):
            shown = urlencode(TAGS | {"darkMode": str(scheme == DARK).lower()})
            browser.open(f"{address}/?{shown}#timeseries", scheme, DRAWN)
            browser.value(WHOLE_CURVES)
            browser.value("document.querySelector('[aria-label=\"Close side pane\"]').click()")
            time.sleep(3)  # until its transitions have ended, of which a page tells nothing
            browser.picture(path)


def of_plan(folder: Path, _: Path | None) -> None:
    """Keep the bars that a plan draws: SVG, in both schemes."""
    _train(folder, *PLAN, "run_id=plan")
    _keep(folder / "runs/gpt2_large/plan/plan.svg")


def of_scaling(folder: Path, _: Path | None) -> None:
    """Keep the curves that a sweep of dry runs draws: SVG, in both schemes."""
    _train(folder, *SCALING)
    _keep(folder / "runs/gpt2/grid/scaling.svg")


PICTURES: dict[str, Callable[[Path, Path | None], None]] = {
    "drawings": of_drawings,
    "tensorboard": of_tensorboard,
    "plan": of_plan,
    "scaling": of_scaling,
}


def _both(name: str) -> Iterator[tuple[str, Path]]:
    path = FOLDER / name
    yield LIGHT, path
    yield DARK, path.with_stem(f"{path.stem}_dark")


def _keep(path: Path) -> None:
    for made in (path, path.with_stem(f"{path.stem}_dark")):
        shutil.copy(made, FOLDER)


def _runs(folder: Path) -> Path:
    """Return the folder of the runs, which are made if they are not there."""
    runs = folder / "runs" / "gpt"
    for run_id, switches in RUNS.items():
        if not (runs / run_id / "ended.json").exists():
            _train(folder, *SHORT, *switches, f"run_id={run_id}", "trainer.accelerator=cpu")
    return runs


def _train(folder: Path, *arguments: str) -> None:
    _run(str(CHECKOUT / "train.py"), *arguments, folder=folder)


def _run(*arguments: str, folder: Path) -> None:
    print("python", *arguments, flush=True)
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def _tensorboard(runs: Path) -> Iterator[str]:
    """Serve TensorBoard of a folder of runs, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, timeout_seconds: float = 60) -> None:
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()
