"""Say what a machine, or all nodes of a job, can do, and what is wrong with them.

python -m lightswitch.doctor
srun --nodes=2 --ntasks-per-node=1 python -m lightswitch.doctor
torchrun --nproc-per-node=8 -m lightswitch.doctor

Rank 0 prints the report. The exit code is 1 where it names a problem.
"""

from __future__ import annotations

from lightswitch.errors import Command, Refused


def main() -> None:
    """Run the command, and exit with code 1 if the report names a problem, else with 0."""
    parser = Command("lightswitch.doctor", __doc__)
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="limit for each step; default: 60")
    timeout_seconds = parser.parse_args().timeout

    from lightswitch.cluster import environments
    from lightswitch.doctor.examination import end, examine

    problems: list[str] = []
    try:
        examine(problems, timeout_seconds)
    except Refused as refused:
        problems += refused.problems
    raise SystemExit(end(problems, environments.detect().global_rank()))


if __name__ == "__main__":
    main()
