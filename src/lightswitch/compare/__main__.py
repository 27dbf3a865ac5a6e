"""Put runs beside one another.

python -m lightswitch.compare runs/NAME/RUN_ID runs/NAME/ANOTHER …
python -m lightswitch.compare runs/NAME/SWEEP_ID
python -m lightswitch.compare runs/NAME/RUN_ID runs/NAME/ANOTHER -o ddp_or_fsdp.html
python -m lightswitch.compare runs/NAME/* --tag baseline

Whoever launched them, and also a run and the one that went on from its checkpoint. The tables are printed, and written
as Markdown beside the page, an HTML file that needs nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightswitch.errors import Command, Refused


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; it ends with exit code 2 and a line on stderr where it refuses."""
    parser = _parser()
    arguments = parser.parse_args(words)

    from lightswitch.compare import page  # it takes its time to import, in which Ctrl+C may come

    try:
        for told in page.write(arguments.runs, arguments.output, arguments.tag):
            print(told, flush=True)
    except (OSError, Refused) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = Command("lightswitch.compare", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory, or a sweep's: all its jobs")
    parser.add_argument("--tag", action="append", default=[], help="compare the runs that are marked with it alone")
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
