"""All the papers' figures: predicted beside published, how long each takes, and what misses by how much.

Prints Markdown; half a minute to a minute.
"""

from __future__ import annotations

import time

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.published import TOLERANCE, Quantity, Use
from counterflow.papers.figures.reproduction import Checked, Reproduction, reproduce, within


def lines(found: Reproduction) -> list[str]:
    """A figure's rows of the table."""
    return [
        f"| {found.figure.name} | {row.published.label} | {runs(row)} | {' / '.join(row.found)} | "
        f"{value(row.predicted)} | {value(row.published.value)} | {difference(row)} | {there(row)} | "
        f"{row.published.use} |"
        for row in found.rows
    ]


def runs(row: Checked) -> str:
    """The runs of a row."""
    named = row.published.runs
    if len(named) == 1:
        return named[0]
    how = "efficiency, " if row.published.quantity is Quantity.EFFICIENCY else "mean, "
    return f"{how}{named[0]} to {named[-1]}"


def value(ratio: float | None) -> str:
    """A ratio, or nothing."""
    return "" if ratio is None else f"{ratio:.3f}"


def difference(row: Checked) -> str:
    """What a prediction is off by, or whether a configuration is found; bold where it misses."""
    if row.same is not None:
        text = "found" if row.same else "another"
    else:
        text = "nothing fits" if row.difference is None else f"{row.difference:+.1%}"
    return text if row.holds else f"**{text}**"


def there(row: Checked) -> str:
    """The same with the configurations that the paper states."""
    if row.same is not None or row.stated_difference is None:
        return ""
    return f"{row.stated_difference:+.1%}"


def main() -> None:
    """Reproduce every figure and print what was found."""
    found: dict[str, Reproduction] = {}
    seconds: dict[str, float] = {}
    for name, figure in FIGURES.items():
        start = time.perf_counter()
        found[name] = reproduce(figure)
        seconds[name] = time.perf_counter() - start
    print("| figure | over | run | found | predicted | published | difference | as the paper states | use |")
    print("|---|---|---|---|--:|--:|--:|--:|---|")
    for each in found.values():
        print("\n".join(lines(each)))
    rows = [row for each in found.values() for row in each.rows]
    tests = [row for row in rows if row.same is None and row.published.use is Use.TEST]
    best = [row for row in rows if row.same is not None]
    print(
        f"\n{sum(row.holds for row in tests)} of {len(tests)} test ratios within {TOLERANCE:.0%} "
        f"({sum(within(row.stated_difference) for row in tests)} with what the papers state of the "
        f"configurations); {sum(row.holds for row in best)} of {len(best)} best configurations found."
    )
    print("\nWhat misses, and why:\n")
    for name, each in found.items():
        for row in each.rows:
            if not row.holds:
                print(f"* {name}, {row.published.label}: {row.published.miss}.")
    print("\nSeconds: " + ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items()))


if __name__ == "__main__":
    main()
