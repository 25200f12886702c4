"""One part of the programme, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from kit import arguments

from one_gpu import PARTS, Report, run_part


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=[part.name for part in PARTS], required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--thin", type=int, default=1)
    parser.add_argument("--end", type=float, required=True, help="time of time.monotonic, of all processes")
    options = parser.parse_args()
    report = Report(options.part, options.rows, options.end, options.pretend, options.thin)
    run_part(options.part, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
