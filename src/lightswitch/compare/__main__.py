"""Put runs beside one another.

python -m lightswitch.compare runs/NAME/RUN_ID runs/NAME/ANOTHER …
python -m lightswitch.compare runs/NAME/SWEEP_ID
python -m lightswitch.compare runs/NAME/RUN_ID runs/NAME/ANOTHER -o ddp_or_fsdp.html

Whoever launched them, and also a run and the one that went on from its checkpoint. The tables are printed, and written
as Markdown beside the page, an HTML file that needs nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightswitch.compare import files
from lightswitch.errors import ExitCode, Refused


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; it ends with exit code 2 and a line on stderr where it refuses."""
    arguments = _parser().parse_args(words)
    try:
        for told in files.write(arguments.runs, arguments.output):
            print(told, flush=True)
    except (OSError, Refused) as error:
        _exit_with(str(error))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _exit_with(message)


def _exit_with(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(ExitCode.REFUSED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m lightswitch.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory, or a sweep's: all its jobs")
    parser.add_argument("-o", "--output", type=_page, metavar="FILE.html", help="compare.html beside the runs, if not")
    return parser


def _page(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".html":
        raise argparse.ArgumentTypeError(f"{text}: end it with .html; the Markdown goes beside it")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}; make it, or name another file")
    return path


if __name__ == "__main__":
    main()
