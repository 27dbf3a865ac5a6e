"""Compare runs.

python -m lightswitch.compare runs/NAME/RUN_ID runs/NAME/ANOTHER …
python -m lightswitch.compare runs/NAME/SWEEP_ID
python -m lightswitch.compare runs/NAME/RUN_ID runs/NAME/ANOTHER -o ddp_or_fsdp.html
python -m lightswitch.compare runs/NAME/*

The runs may be of different models, names and launchers, and one may have resumed from another's checkpoint. The tables
are printed, and written to a self-contained HTML page with pictures of the curves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightswitch.errors import Command, Refused


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; print an error line to stderr and exit with code 2 if the runs can't be compared."""
    parser = _parser()
    arguments = parser.parse_args(words)

    from lightswitch.compare import page  # slow to import; Command already handles Ctrl+C by now

    try:
        for message in page.write(arguments.runs, arguments.output):
            print(message, flush=True)
    except (OSError, Refused) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = Command("lightswitch.compare", __doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="a run directory, or a sweep's directory for all its jobs"
    )
    parser.add_argument("-o", "--output", type=_page, metavar="FILE.html", help="default: compare.html beside the runs")
    return parser


def _page(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".html":
        raise argparse.ArgumentTypeError(f"{text}: end it with .html")
    return path


if __name__ == "__main__":
    main()
