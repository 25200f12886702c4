"""The house in figures, from the source alone: its size, its names, and how many places know one fact.

    python benchmarks/house.py [--json] [--verbose]

Nothing is imported of what is measured. ``GOALS`` are what the house is to keep, ``BUDGETS`` the lines of
code of each room; the exit code is 1 if a figure misses its goal. What has to be run to be known (speed,
tests, what a change opens) is read from ``results/house.toml``, where each figure has its command, machine
and date.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from kit import RESULTS, arguments

ROOT = Path(__file__).resolve().parents[1] / "src" / "counterflow"

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
    ),
    *("measure", "verification", "models", "data", "checkpoints", "training", "integrations", "papers"),
    *("explore", "cli"),
)
"""Each may know those before it."""

BESIDE = ("papers", "integrations", "explore", "testing")
"""Rooms that nothing in the core imports."""

WORDS = frozenset(
    (
        *("its", "told", "tell", "asked", "ask", "found", "given", "held", "made", "kept", "taken", "came"),
        *("left", "mine", "theirs", "ours", "there", "beside", "apart", "alike", "one", "other", "others"),
        *("each", "every", "again", "own", "whole"),
    )
)
"""Pronouns and participles, which are no names of things."""

CLAUSES = frozenset(
    (
        *("What", "Whether", "How", "Which", "Where", "Why", "When", "Who", "Of", "By", "Those", "That"),
        *("Around", "Within"),
    )
)
"""Words with which no docstring begins."""

LONG = 450
"""Lines of a file."""

GOALS: dict[str, float] = {
    "lines of code": 51_000,
    "lines of code of the core": 45_500,
    "modules in a circle of imports": 0,
    "imports of a room above": 0,
    "% of bindings that are no names": 2.0,
    "the same in runtime": 1.0,
    "the same in planning": 1.0,
    "runtime modules that others import": 20,
    "class names in several rooms": 25,
    "module names twice": 15,
    "docstrings that begin with See": 0,
    "docstrings of private names": 300,
    "docstrings that begin with a clause": 150,
    "tables by place of the op kinds": 0,
    "matches of op kinds": 0,
    "files over 450 lines": 0,
    "errors that say leave away": 0,
    "modules at the root": 6,
    "files that list transports": 2,
    "rooms over their budget": 0,
}

BUDGETS = {
    "api": 400,
    "capture": 3_000,
    "checkpoints": 1_400,
    "cli": 3_400,
    "common": 400,
    "data": 500,
    "drawing": 1_800,
    "explore": 1_700,
    "integrations": 2_200,
    "measure": 1_600,
    "models": 1_800,
    "papers": 2_200,
    "planning": 5_500,
    "program": 2_100,
    "root": 500,
    "runtime": 19_600,
    "schedule": 4_100,
    "simulation": 2_000,
    "synthesis": 3_100,
    "testing": 1_400,
    "training": 4_100,
    "verification": 1_200,
}
"""Lines of code that a room may have: what it had when this was written, in hundreds, rounded up."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Figure:
    """A count.

    Attributes:
        name: what is counted.
        value: how many there are.
        places: where.
    """

    name: str
    value: float
    places: tuple[str, ...] = ()

    @property
    def goal(self) -> float | None:
        """Most that there may be; None: any number."""
        return GOALS.get(self.name)

    @property
    def missed(self) -> bool:
        """True if there are more than that."""
        return self.goal is not None and self.value > self.goal


@dataclass(frozen=True)
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
        """The folder of the package that it is in; "root" for the package's own files."""
        return self.name.partition(".")[0] if self.path.parent != ROOT else "root"

    @property
    def package(self) -> bool:
        """True if it is an ``__init__``."""
        return self.path.name == "__init__.py"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def code_lines(self) -> int:
        """Lines that are neither blank nor a comment nor in a docstring."""
        text = {
            line
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines = enumerate(self.text.splitlines(), 1)
        return sum(1 for at, line in lines if at not in text and line.strip() and line.strip()[0] != "#")

    @cached_property
    def bindings(self) -> list[tuple[int, str]]:
        """Lines and names of functions, parameters, classes, variables and attributes."""
        names: list[tuple[int, str]] = []
        for node in self.nodes:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    args = node.args
                    names.append((node.lineno, node.name))
                    names += [(a.lineno, a.arg) for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
                case ast.ClassDef():
                    names.append((node.lineno, node.name))
                case ast.Name(ctx=ast.Store()):
                    names.append((node.lineno, node.id))
                case ast.Attribute(ctx=ast.Store()):
                    names.append((node.lineno, node.attr))
        return names

    def forbidden(self) -> list[tuple[int, str]]:
        """Bindings that are no names of things."""
        return [(line, name) for line, name in self.bindings if is_forbidden(name)]

    @cached_property
    def docstrings(self) -> list[tuple[str, str]]:
        """Names of what has a docstring, and these."""
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [node for node in self.nodes if isinstance(node, kinds)]
        texts = [(getattr(node, "name", ""), ast.get_docstring(node)) for node in nodes]
        return [(name, text) for name, text in texts if text]


def is_forbidden(name: str) -> bool:
    """True if a name is a pronoun or participle, whatever its case and underscores."""
    return name.strip("_").lower() in WORDS


def modules() -> dict[str, Module]:
    """Every file of the package, by its dotted name."""
    files = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        files[name] = Module(name, path, text, ast.parse(text))
    return files


def imports(module: Module, known: Iterable[str]) -> set[str]:
    """The modules that one imports, also for types, within functions and by name."""
    package = module.name if module.package else module.name.rpartition(".")[0]
    names: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name.removeprefix("counterflow.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(_imported(node, package))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names.update(t.removeprefix("counterflow.") for t in texts if isinstance(t, str))
    return names & {*known} - {module.name}


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


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that reach themselves by imports."""

    def reach(name: str) -> set[str]:
        seen: set[str] = set()
        front = [*graph[name]]
        while front:
            module = front.pop()
            if module not in seen:
                seen.add(module)
                front += graph[module]
        return seen

    return [name for name in graph if name in reach(name)]


def share(files: Iterable[Module]) -> float:
    """Percent of bindings that are no names."""
    rows = [(len(module.bindings), len(module.forbidden())) for module in files]
    return round(100 * sum(bad for _, bad in rows) / max(1, sum(count for count, _ in rows)), 2)


def of_imports(known: dict[str, Module]) -> Iterator[Figure]:
    """Figures of who knows whom."""
    files = {name: module for name, module in known.items() if not module.package}
    graph = {name: imports(module, files) for name, module in files.items()}
    edges = [(files[name], files[to]) for name, others in graph.items() for to in sorted(others)]
    ranks = {room: rank for rank, room in enumerate(ROOMS)}
    above = [
        f"{a.name} -> {b.name}"
        for a, b in edges
        if a.room in ranks and b.room in ranks and ranks[b.room] > ranks[a.room]
    ]
    door = sorted({b.name for a, b in edges if b.room == "runtime" != a.room})
    circle = circles(graph)
    yield Figure("modules in a circle of imports", len(circle), tuple(circle))
    yield Figure("imports of a room above", len(above), tuple(above))
    yield Figure("runtime modules that others import", len(door), tuple(door))


def of_names(known: dict[str, Module]) -> Iterator[Figure]:
    """Figures of names and docstrings."""
    files = known.values()
    words = Counter(name.strip("_").lower() for module in files for _, name in module.forbidden())
    most = tuple(f"{word} {count}" for word, count in words.most_common(15))
    yield Figure("% of bindings that are no names", share(files), most)
    for room in ("runtime", "planning"):
        yield Figure(f"the same in {room}", share(m for m in files if m.room == room))
    rooms: dict[str, set[str]] = defaultdict(set)
    for module in files:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                rooms[node.name].add(module.room)
    several = tuple(sorted(name for name, homes in rooms.items() if len(homes) > 1))
    yield Figure("class names in several rooms", len(several), several)
    stems = Counter(m.path.stem for m in files if not m.package and m.path.stem != "__main__")
    twice = tuple(sorted(stem for stem, count in stems.items() if count > 1))
    yield Figure("module names twice", len(twice), twice)
    texts = [(module.name, name, text) for module in files for name, text in module.docstrings]
    see = [module for module, _, text in texts if re.match(r"See `", text)]
    private = [module for module, name, _ in texts if name.startswith("_") and not name.startswith("__")]
    clauses = [module for module, _, text in texts if text.split()[0].strip(".,:") in CLAUSES]
    yield Figure("docstrings that begin with See", len(see), tuple(see))
    yield Figure("docstrings of private names", len(private), _counted(private))
    yield Figure("docstrings that begin with a clause", len(clauses), _counted(clauses))


def of_facts(known: dict[str, Module]) -> Iterator[Figure]:
    """Figures of how many places know one fact."""
    zips, cases = [], []
    for module in known.values():
        for node in module.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "zip":
                zips += [module.name] * any("OpKind" in ast.unparse(a) for a in node.args)
            elif isinstance(node, ast.match_case) and "OpKind" in ast.unparse(node.pattern):
                cases.append(module.name)
    yield Figure("tables by place of the op kinds", len(zips), tuple(zips))
    yield Figure("matches of op kinds", len(cases), _counted(cases))
    names = [f'"{name}"' for name in ("local", "gloo", "nccl", "strict-nccl")]
    listing = tuple(m.name for m in known.values() if sum(name in m.text for name in names) > 1)
    yield Figure("files that list transports", len(listing), listing)
    away = [m.name for m in known.values() for _ in re.findall(r"leave[^\"'\n]{0,60}away", m.text)]
    yield Figure("errors that say leave away", len(away), tuple(away))


def of_size(known: dict[str, Module]) -> Iterator[Figure]:
    """Figures of lines and files."""
    rooms = lines_of_rooms(known)
    yield Figure("lines of code", sum(rooms.values()), tuple(f"{r} {n:,}" for r, n in rooms.most_common()))
    yield Figure("lines of code of the core", sum(n for room, n in rooms.items() if room not in BESIDE))
    over = tuple(
        f"{room}: {n:,} of {BUDGETS.get(room, 0):,}" for room, n in rooms.items() if n > BUDGETS.get(room, 0)
    )
    yield Figure("rooms over their budget", len(over), over)
    comments = sum(_comments(module.text) for module in known.values())
    yield Figure("lines of comments", comments)
    long = tuple(m.name for m in known.values() if len(m.text.splitlines()) > LONG)
    yield Figure("files over 450 lines", len(long), long)
    yield Figure("files", len(known))
    roots = tuple(m.name for m in known.values() if m.room == "root")
    yield Figure("modules at the root", len(roots), roots)


def lines_of_rooms(known: dict[str, Module]) -> Counter[str]:
    """Lines of code by room."""
    rooms: Counter[str] = Counter()
    for module in known.values():
        rooms[module.room] += module.code_lines
    return rooms


def _comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum("noqa" not in comment and "type:" not in comment for comment in comments)


def _counted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name} {count}" for name, count in Counter(names).most_common())


def figures() -> list[Figure]:
    """All that is counted."""
    known = modules()
    return [figure for part in (of_size, of_imports, of_names, of_facts) for figure in part(known)]


def main() -> int:
    """Print the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--json", action="store_true", help="as JSON, with the places of each")
    parser.add_argument("--verbose", action="store_true", help="with the places of each")
    options = parser.parse_args()
    rows = figures()
    if options.json:
        print(json.dumps([asdict(figure) | {"goal": figure.goal} for figure in rows], indent=2))
        return int(any(figure.missed for figure in rows))
    print(f"{'':48}{'now':>8}{'goal':>9}")
    for figure in rows:
        goal = "" if figure.goal is None else f"{figure.goal:,}"
        print(f"{figure.name:48}{figure.value:>8,}{goal:>9}{'  missed' * figure.missed}")
        if options.verbose:
            print(*(f"    {place}" for place in figure.places), sep="\n", end="\n" * bool(figure.places))
    for table, measured in tomllib.loads((RESULTS / "house.toml").read_text(encoding="utf-8")).items():
        print(f"\n{table}")
        for row in measured:
            print(f"{row['what']:48}{row['before']:>8}{row['now']:>8}{row['goal']:>9}  ({row['how']})")
    return int(any(figure.missed for figure in rows))


if __name__ == "__main__":
    sys.exit(main())
