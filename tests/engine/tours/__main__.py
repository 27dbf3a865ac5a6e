"""The ways to train in a ring, and the pairs of choices: what `make test` runs of all that could be switched.

python -m tests.engine.tours
"""

from __future__ import annotations

from tests.engine.tables.documents import markdown
from tests.engine.tours.pairs import FACTORS, REFUSED, all_pairs, rows
from tests.engine.tours.ring import RING, SEED, next_way


def main() -> None:
    print(f"TOUR_SEED={SEED}: begun and killed under one way, ended under another\n")
    print(*markdown(["from", "to"], [[way, next_way(way)] for way in RING]), sep="\n")
    print(f"\n{len(rows())} runs for {len(all_pairs()) - len(REFUSED)} pairs of choices\n")
    print(*markdown(["choice", *FACTORS], [[row.strategy, *row.values] for row in rows()]), sep="\n")
    print(f"\n{len(REFUSED)} pairs are refused\n")
    print(*markdown(["pair", "line"], [[" × ".join(pair), f"{line} …"] for pair, line in REFUSED.items()]), sep="\n")


if __name__ == "__main__":
    main()
