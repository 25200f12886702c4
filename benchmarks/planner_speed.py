"""How many candidates a second the planner's search decides, and what its process takes, in processor time.

Every run is a process of its own, so that what a search loads (numba) is counted; modules have been compiled
to bytecode by a first run that is not counted, as in every installation. With ``--against SRC`` another
tree's ``src`` takes turns with this one, so that both meet the same machine. Medians of user and system time;
the wall clock says little on a machine that is busy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from kit import arguments, machine_line

HERE = Path(__file__).parents[1] / "src"

SEARCH = """
import sys
from time import process_time as now
from counterflow.planning.task import load_example
from counterflow.planning.search.search import search
given = load_example(sys.argv[1])
began = now()
found = search(given.model, given.profile, given.cluster, given.mini_batch)
took = now() - began
print(sum(row.candidates for row in found.rejections), took, now())
"""


def taken(source: Path, example: str) -> tuple[int, float, float]:
    """Candidates, and processor seconds of the search and of its process."""
    keeps_bytecode = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        [sys.executable, "-c", SEARCH, example],
        env=keeps_bytecode | {"PYTHONPATH": str(source)},
        check=True,
        capture_output=True,
        text=True,
    )
    candidates, search, whole = process.stdout.split()
    return int(candidates), float(search), float(whole)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--example", default="chimera-bert48-2048")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--against", type=Path, help="the src of another tree")
    args = parser.parse_args()
    trees = {"this tree": HERE} | ({"the other": args.against} if args.against else {})
    print(machine_line())
    runs: dict[str, list[tuple[int, float, float]]] = {name: [] for name in trees}
    for source in trees.values():
        taken(source, args.example)
    for _ in range(args.runs):
        for name, source in trees.items():
            runs[name].append(taken(source, args.example))
    print(f"\n{args.example}, medians of {args.runs}, processor seconds\n")
    print(f"{'':12}{'candidates':>12}{'search':>9}{'process':>9}{'candidates a second':>21}")
    for name, rows in runs.items():
        search, whole = (statistics.median(row[i] for row in rows) for i in (1, 2))
        print(f"{name:12}{rows[0][0]:>12,}{search:>9.2f}{whole:>9.2f}{rows[0][0] / search:>21,.0f}")


if __name__ == "__main__":
    main()
