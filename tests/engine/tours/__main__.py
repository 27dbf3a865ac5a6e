"""The ways to train in chains, and the pairs of choices: what is run of all that could be switched.

python -m tests.engine.tours
"""

from __future__ import annotations

from tests.engine.tables.documents import markdown
from tests.engine.tours.pairs import CHAINS, FACTORS, REFUSED, all_pairs, rows


def main() -> None:
    print("begun and killed under one way, killed under another, ended under a third\n")
    print(*markdown(["from", "over", "to"], CHAINS), sep="\n")
    print(f"\n{len(rows())} runs for {len(all_pairs()) - len(REFUSED)} pairs of choices\n")
    print(*markdown(["choice", *FACTORS], [[row.strategy, *row.values] for row in rows()]), sep="\n")
    print(f"\n{len(REFUSED)} pairs are refused\n")
    print(*markdown(["pair", "line"], [[" × ".join(pair), f"{line} …"] for pair, line in REFUSED.items()]), sep="\n")


if __name__ == "__main__":
    main()
