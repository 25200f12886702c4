"""The house in figures, from the source alone: its size, and how many places know one fact.

    python benchmarks/house.py [--json] [--verbose]

Nothing is imported of what is measured. The limits are those that the house is to keep; the exit code is 1 if
a figure is above its limit. What has to be run to be known (speed, tests, what a change opens) is read from
``results/house.toml``, where each figure has its command, machine and date.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "counterflow"
MEASURED = Path(__file__).resolve().parent / "results" / "house.toml"
ROOMS = (
    *(
        "schedule",
        "program",
        "simulation",
        "drawing",
        "synthesis",
        "planning",
        "capture",
        "runtime",
        "testing",
        "measure",
    ),
    *(
        "verification",
        "models",
        "data",
        "checkpoints",
        "training",
        "integrations",
        "papers",
        "explore",
        "cli",
    ),
)
"""Each may know those before it."""

TRANSPORTS = ("local", "gloo", "nccl", "strict-nccl")
KINDS = re.compile(r"\bOpKind\.[A-Z_]+")
LONG = 450


@dataclass(frozen=True, slots=True)
class Figure:
    """A count.

    Attributes:
        name: what is counted.
        value: how many there are.
        limit: how many there may be; None: any number.
        found: where.
        before: what it was at baddfff, before the house was rebuilt; None: it was not counted.
    """

    name: str
    value: int
    limit: int | None = None
    found: tuple[str, ...] = ()
    before: int | None = None

    @property
    def over(self) -> bool:
        """Whether there are more than there may be."""
        return self.limit is not None and self.value > self.limit


@dataclass(frozen=True, slots=True)
class Module:
    """A file of the package.

    Attributes:
        name: within the package, dotted.
        path: of the file.
        text: what is in it.
        tree: the same, parsed.
    """

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder of the package that it is in; "" for the package's own files."""
        return self.name.partition(".")[0] if self.path.parent != ROOT else ""

    @property
    def code_lines(self) -> int:
        """Lines that are neither blank nor a comment nor in a docstring."""
        said = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines = enumerate(self.text.splitlines(), 1)
        return sum(1 for at, line in lines if at not in said and line.strip() and line.strip()[0] != "#")


def modules() -> dict[str, Module]:
    """Every file of the package, by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, path, text, ast.parse(text))
    return found


def imports(module: Module, known: dict[str, Module]) -> set[str]:
    """The modules of the package that one imports, also within functions and by name; not for types alone."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for_types = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    named: set[str] = set()
    for node in ast.walk(module.tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom):
            named.update(_imported(node, package))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named.update(
                a.value.removeprefix("counterflow.")
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )
    return {name for name in named if name in known and name != module.name}


def _imported(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*filter(None, above), *filter(None, [node.module])])
    elif base.partition(".")[0] == "counterflow":
        base = base.partition(".")[2]
    else:
        return
    yield base
    yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def circle_of(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def figures() -> list[Figure]:
    """All that is counted."""
    known = modules()
    files = {name: module for name, module in known.items() if module.path.name != "__init__.py"}
    graph = {name: imports(module, known) & files.keys() for name, module in files.items()}
    circle = circle_of(graph)
    upward = tuple(
        f"{name} -> {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if files[name].room in ROOMS
        and files[other].room in ROOMS
        and ROOMS.index(files[other].room) > ROOMS.index(files[name].room)
    )
    homes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in known.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes[module.room, node.name].append(module.name)
    functions = [
        (node, f"{module.name}.{node.name}")
        for module in known.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines, longest = max(((f.end_lineno or 0) - f.lineno + 1, name) for f, name in functions)
    (pipeline,) = (f for f, name in functions if name == "runtime.pipeline.__init__")
    folders = Counter(str(m.path.parent.relative_to(ROOT)) for m in files.values())
    ((widest, width),) = folders.most_common(1)
    twice = tuple(f"{room}: {name}" for (room, name), where in homes.items() if len(where) > 1)
    long = tuple(m.name for m in known.values() if len(m.text.splitlines()) > LONG)
    kinds = tuple(m.name for m in known.values() if KINDS.search(m.text))
    transports = tuple(
        m.name for m in known.values() if sum(f'"{word}"' in m.text for word in TRANSPORTS) > 1
    )
    return [
        Figure("lines of code", sum(m.code_lines for m in known.values()), 32_000, before=41_700),
        Figure("files", len(known)),
        Figure("modules in a circle of imports", len(circle), 0, circle, before=57),
        Figure("imports of a room above", len(upward), 0, upward, before=2),
        Figure("files that name kinds of ops", len(kinds), 14, kinds, before=51),
        Figure("files that list transports", len(transports), 2, transports, before=12),
        Figure("class names twice in a room", len(twice), 0, twice, before=15),
        Figure(f"files over {LONG} lines", len(long), 5, long, before=14),
        Figure("files in the widest folder", width, None, (widest,)),
        Figure(
            "lines of the longest function",
            lines,
            None,
            (longest,),
        ),
        Figure(
            "parameters of Pipeline, `execution` one of them",
            len(pipeline.args.args) + len(pipeline.args.kwonlyargs) - 1,
            15,
            before=34,
        ),
    ]


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="The house in figures, from the source alone.")
    parser.add_argument("--json", action="store_true", help="as JSON, with where each was found")
    parser.add_argument("--verbose", action="store_true", help="with where each was found")
    asked = parser.parse_args()
    found = figures()
    if asked.json:
        print(json.dumps([asdict(figure) for figure in found], indent=2))
    else:
        print(f"{'':48}{'before':>8}{'now':>8}{'at most':>9}")
        for figure in found:
            before, limit = (f"{x:,}" if x is not None else "" for x in (figure.before, figure.limit))
            over = "  over" if figure.over else ""
            print(f"{figure.name:48}{before:>8}{figure.value:>8,}{limit:>9}{over}")
            if asked.verbose:
                print(*(f"    {place}" for place in figure.found), sep="\n", end="\n" * bool(figure.found))
        for table, rows in tomllib.loads(MEASURED.read_text(encoding="utf-8")).items():
            print(f"\n{table}")
            for row in rows:
                print(f"{row['what']:48}{row['before']:>8}{row['now']:>8}{row['goal']:>9}  ({row['how']})")
    return int(any(figure.over for figure in found))


if __name__ == "__main__":
    sys.exit(main())
