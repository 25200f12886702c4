"""Attributes that a user may set on a pipeline, and the errors of all others."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from counterflow.execution import Flat

SETTABLE = frozenset({"keeps_gradients", "steps"})
"""Attributes that a user may set."""


def refuse_setting(pipeline: object, name: str, value: object, parameters: Sequence[str]) -> None:
    """Refuse to set an attribute of a pipeline that would change nothing.

    Names that begin with an underscore are the engine's own, methods may be wrapped, and a class derived from
    ``Pipeline`` may have further attributes.

    Args:
        pipeline: the pipeline.
        name: name of the attribute.
        value: value to set.
        parameters: names of the arguments of ``Pipeline`` beside options.

    Raises:
        AttributeError: the attribute is one of those.
    """
    of_class = getattr(type(pipeline), name, None)
    if name in SETTABLE or name.startswith("_") or (callable(of_class) and callable(value)):
        return
    options = dict.fromkeys([*Flat.__annotations__, *parameters])
    if name in options and name != "options":
        raise AttributeError(
            f"{name} is an option of a pipeline that is made, and setting it would change nothing; give it "
            f"to cf.Pipeline(..., {name}=...)"
        )
    if of_class is not None or name in vars(pipeline):
        raise AttributeError(f"{name} of a pipeline follows from how it was made, and cannot be set")
    if type(pipeline).__module__.startswith("counterflow."):
        near = difflib.get_close_matches(name, [*options, *SETTABLE], n=1)
        raise AttributeError(
            f"a pipeline has no attribute {name!r} to set{f'; did you mean {near[0]!r}?' if near else '.'} "
            f"Only {' and '.join(sorted(SETTABLE))} are set, and options are given to cf.Pipeline(...)"
        )
