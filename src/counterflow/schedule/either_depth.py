"""Builders of schemes that accept both ``workers`` and ``stages`` for the depth."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, Unpack, overload

from .ir import Schedule
from .scheme import DEPTH, SLICES, Scheme
from .scheme_keywords import Sizes

_P = ParamSpec("_P")


class EitherDepth(Protocol[_P]):
    """A scheme's builder that accepts both ``workers`` and ``stages`` for the depth."""

    __name__: str

    @overload
    def __call__(self, *sizes: _P.args, **options: _P.kwargs) -> Schedule: ...
    @overload
    def __call__(self, **options: Unpack[Sizes]) -> Schedule: ...


def either_depth(scheme: Scheme, build: Callable[_P, Schedule]) -> EitherDepth[_P]:
    """The builder of a scheme that accepts both ``workers=`` and ``stages=``.

    Args:
        scheme: record of the scheme.
        build: its own builder, which accepts one of the two.
    """
    names = [*inspect.signature(build).parameters]

    @wraps(build)
    def by_either(*sizes: Any, **options: Any) -> Schedule:
        if any(name in options for name in (*DEPTH, SLICES) if name != scheme.depth):
            values = {**dict(zip(names, sizes, strict=False)), **options}
            scheme.refuse_unknown(values)
            scheme.refuse_missing_or_illegal(
                values, {scheme.depth if name in DEPTH else name for name in values}
            )
            return scheme.schedule(values)
        return scheme.build(*sizes, **options)

    by_either.__module__ = build.__module__.rpartition(".")[0]  # where the function is found, also by pickle
    return by_either
