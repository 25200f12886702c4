"""Use that code makes of an object that it reaches by a path: it reads it, or only writes it.

It is read off the source. A write is an assignment to an entry or attribute, or the call of a method whose
value nobody uses (``seen.append(x)``). All other uses are reads: tests, arguments, iterations, other names.

Invariant: in doubt, and where there is no source, it is a read, and may be a write.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from enum import Flag
from functools import lru_cache
from types import CodeType

from .reach import Kind, Path, Step

_KEYED = {"get", "pop", "setdefault", "__getitem__"}
"""Methods that use the entry that their first argument names."""

_CHANGES = {"pop", "popitem", "popleft", "setdefault"}
"""Methods that change a container and return a value."""


class Use(Flag):
    """Use of an object."""

    NONE = 0
    WRITE = 1
    READ = 2
    MAY_WRITE = 4
    """The source does not show whether it is a write."""
    ANY = READ | MAY_WRITE

    @property
    def writes(self) -> bool:
        """True if it is a write, or may be one."""
        return bool(self & (Use.WRITE | Use.MAY_WRITE))


def use_of(paths: Iterable[Path], codes: Iterable[CodeType], changed: Collection[Hashable]) -> Use:
    """Return the use that code makes of some entries of an object.

    Args:
        paths: paths by which the code reaches the object.
        codes: code of the functions.
        changed: the entries.
    """
    sources = [_source(code) for code in codes]
    use = Use.NONE
    for path in paths:
        for anchor, rest in _anchors(path, changed):
            if anchor is None:
                return Use.ANY
            for source in sources:
                if use is not Use.ANY | Use.WRITE:
                    use |= source.use(anchor, rest, changed)
    return use


def _anchors(path: Path, changed: Collection[Hashable]) -> Iterator[tuple[Step | None, Sequence[Step]]]:
    # name by which code reaches the object, and the steps from there; None: unknown
    first = 0
    for number, (kind, _) in enumerate(path):
        if kind is Kind.ELSEWHERE:
            yield None, ()
            return
        if kind in {Kind.LAYER, Kind.INSIDE}:
            first = number + 1
        elif kind in {Kind.NAME, Kind.VARIABLE, Kind.MODULE}:
            first = number
    rest = path[first:]
    while rest and rest[0][0] is Kind.MEMBER:
        rest = rest[1:]
    if rest:
        yield rest[0], rest[1:]
    elif "" in changed:  # a buffer, which a library's code may change
        yield None, ()
    else:  # the object's own code names its entries
        yield from (((Kind.ATTRIBUTE, name), ()) for name in changed)


class _Source:
    """The source of code, with the parents of its expressions.

    Args:
        root: the source; None: there is none.
        names: all names and texts that the code has.
    """

    def __init__(self, root: ast.AST | None, names: Collection[object]) -> None:
        self._names, self._known = names, root is not None
        self._nodes = [] if root is None else list(ast.walk(root))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        for node in self._nodes:
            if isinstance(node, ast.Attribute) and node.attr.startswith("__") and node.attr not in names:
                node.attr = next(
                    (str(n) for n in names if str(n).endswith(node.attr)), node.attr
                )  # a private name

    def use(self, anchor: Step, rest: Sequence[Step], changed: Collection[Hashable]) -> Use:
        """Return the use of what the code reaches from a name by some steps."""
        kind, name = anchor
        if name not in self._names:
            return Use.NONE
        uses = Use.NONE if self._known else Use.ANY
        for node in self._nodes:
            if kind in {Kind.NAME, Kind.VARIABLE}:
                fits = isinstance(node, ast.Name) and node.id == name
                if kind is Kind.NAME and isinstance(self._parents.get(node), _ASSIGNMENTS) and _is_set(node):
                    continue  # the name gets another object, perhaps within one function alone
            else:
                fits = isinstance(node, ast.Attribute) and node.attr == name
                if _is_getattr(node, name):
                    uses |= Use.ANY
            if fits:
                uses |= self._of_chain(node, list(rest), changed)
        return uses

    def _of_chain(self, node: ast.AST, rest: list[Step], changed: Collection[Hashable]) -> Use:
        while rest:
            outer = self._parents.get(node)
            if _is_set(node):
                return Use.NONE  # the name gets another object
            if isinstance(outer, ast.Subscript) and outer.value is node:
                if _is_other_index(outer.slice, _indices(rest[0])):
                    return Use.NONE
            elif isinstance(outer, ast.Attribute):
                if outer.attr != rest[0][1]:
                    return self._of_method(outer, Use.NONE, ())
            else:
                return self._of_value(node)
            node = outer
            rest.pop(0)
        return self._of_object(node, changed)

    def _of_object(self, node: ast.AST, changed: Collection[Hashable]) -> Use:
        outer = self._parents.get(node)
        if _is_set(node):
            return Use.WRITE
        if isinstance(outer, ast.Subscript) and outer.value is node:
            return Use.NONE if _is_other_index(outer.slice, changed) else self._of_entry(outer)
        if isinstance(outer, ast.Attribute):
            if outer.attr in changed:
                return self._of_entry(outer)
            return self._of_method(outer, Use.NONE, changed)
        return self._of_value(node)

    def _of_value(self, node: ast.AST) -> Use:
        """The use of an expression that is no longer followed: what only looks at it does not change it."""
        outer = self._parents.get(node)
        return Use.READ if isinstance(outer, _LOOKS) else Use.ANY

    def _of_entry(self, node: ast.AST) -> Use:
        while not _is_set(node):
            outer = self._parents.get(node)
            if isinstance(outer, ast.Attribute):
                called = self._of_method(outer, Use.READ, ())
                if called is not Use.READ:
                    return called
            elif not (isinstance(outer, ast.Subscript) and outer.value is node):
                return Use.READ
            node = outer
        return Use.WRITE

    def _of_method(self, node: ast.Attribute, otherwise: Use, entries: Collection[Hashable]) -> Use:
        """The use of what is called, whose value may be called again; ``otherwise``: nothing is called."""
        call = self._parents.get(node)
        if not (isinstance(call, ast.Call) and call.func is node):
            return Use.WRITE if _is_set(node) else otherwise
        if node.attr in _KEYED and call.args and entries and _is_other_index(call.args[0], entries):
            return Use.NONE
        doubt = Use.ANY | Use.WRITE if node.attr in _CHANGES else Use.ANY
        outer = self._parents.get(call)
        while isinstance(outer, ast.Attribute) and isinstance(self._parents.get(outer), ast.Call):
            call = self._parents[outer]
            outer = self._parents.get(call)
        return Use.WRITE if isinstance(outer, ast.Expr) else doubt


_LOOKS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.If, ast.IfExp, ast.While, ast.FormattedValue)

_ASSIGNMENTS = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.withitem, ast.comprehension),
    *(ast.Tuple, ast.List, ast.Starred),
)


def _is_set(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))


def _is_other_index(index: ast.AST, entries: Collection[Hashable]) -> bool:
    return isinstance(index, ast.Constant) and index.value not in entries and "" not in entries


def _indices(step: Step) -> set[Hashable]:
    kind, name = step
    # A member of a sequential is named by the text of its number.
    return {name, int(name)} if kind is Kind.MEMBER and isinstance(name, str) and name.isdigit() else {name}


def _is_getattr(node: ast.AST, name: Hashable) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1):
        return False
    attribute = node.args[1]
    return node.func.id == "getattr" and isinstance(attribute, ast.Constant) and attribute.value == name


@lru_cache(maxsize=4096)
def _source(code: CodeType) -> _Source:
    names = set(_names(code))
    try:
        return _Source(ast.parse(textwrap.dedent(inspect.getsource(code))), names)
    except (OSError, TypeError, SyntaxError):
        return _Source(None, names)


def _names(code: CodeType) -> Iterator[object]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
