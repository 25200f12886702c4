"""Skips: values that one layer makes for a later one, past the layers between, which know nothing of them.

A ``Skip`` is held by the modules that save and load it, so that who makes and who uses it is known without
running anything, and the same layers run without a pipeline: there the value simply waits in the ``Skip``.
In a pipeline it waits in none: a layer takes what it loads with its input and gives what it saves with its
output (``Carried``), so that messages and recomputation treat skips as they treat inputs and outputs.

Invariant: a value that is changed in place after it was saved, and one that is not there when it is loaded,
are refused.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.carry import NOTHING
from counterflow.api.torch_internals import in_backward
from counterflow.common.trees import versions
from counterflow.errors import ConfigError


class Skip:
    """A value that one layer saves and later layers load, whatever their stages.

    ``skip.saver()`` is a module that returns its input and saves it; ``skip.loader()`` is a module that
    returns (its input, the value) or, called without arguments, the value. Both are layers of the model or
    parts of layers, which call them in their forward. A value is anything that stages may pass on.

    Args:
        name: name for messages.
        once: whether the value has no gradient and is equal in all micro-batches of a step (a mask, a rotary
            table): it is sent once a step. Any other value is refused then.

    >>> skip = Skip("entry")
    >>> model = nn.Sequential(skip.saver(), nn.ReLU(), skip.loader())
    >>> model(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]), tensor([-1.,  2.]))
    """

    def __init__(self, name: str, *, once: bool = False) -> None:
        _keep_out_of_compiled_code()
        self.name = name
        self.once = once
        self._empty()
        self._runs = False
        self._with_graph = True

    def saver(self) -> SaveSkip:
        """A module that saves its input and returns it."""
        return SaveSkip(self)

    def loader(self) -> LoadSkip:
        """A module that returns its input together with the value."""
        return LoadSkip(self)

    def __repr__(self) -> str:
        return f"Skip({self.name!r}{', once=True' if self.once else ''})"

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin without a value."""
        return {"name": self.name, "once": self.once}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # -- for the modules

    def _empty(self) -> None:
        self._value: Any = NOTHING
        self._versions: list[int] = []

    def _put(self, value: Any) -> None:
        if self._recomputes():
            if not self._with_graph:
                raise ConfigError(
                    f"the skip {self.name!r} was saved without a graph and again in the backward, as a "
                    "reentrant torch.utils.checkpoint does, which cuts its gradient; save it outside of that"
                )
            return
        if self.once and any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(value)):
            raise ConfigError(
                f"the skip {self.name!r} has once=True and a gradient, which would be that of one micro-"
                "batch only; detach what is saved, or leave out once=True"
            )
        self._with_graph = torch.is_grad_enabled()
        self._value, self._versions = value, versions(value)

    def _get(self) -> Any:
        if self._recomputes():
            raise ConfigError(
                f"the skip {self.name!r} is loaded in a torch.utils.checkpoint, which would load it again in "
                "the backward, when another micro-batch's may be there; load it before, and pass it in"
            )
        if self._value is NOTHING:
            raise ConfigError(
                f"the skip {self.name!r} is loaded before it was saved; save it before in the same layer, or "
                "in an earlier one"
            )
        self._check()
        return self._value

    def _check(self) -> None:
        if versions(self._value) != self._versions:
            raise ConfigError(
                f"the skip {self.name!r} was changed in place after it was saved; save a copy, or let the "
                "layer that changes it make a new tensor"
            )

    def _recomputes(self) -> bool:
        return not self._runs and in_backward()  # a user's checkpoint recomputes


class SaveSkip(nn.Module):
    """A layer that returns its input and saves it; made by ``Skip.saver``."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, value: Any) -> Any:
        """Return the input, and save it."""
        self.skip._put(value)  # noqa: SLF001 - it is the skip's other half
        return value

    def extra_repr(self) -> str:
        """Its name."""
        return repr(self.skip.name)


class LoadSkip(nn.Module):
    """A layer that returns its input and a skip's value, or the value alone; made by ``Skip.loader``."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, value: Any = NOTHING) -> Any:
        """(``value``, what was saved), or without ``value`` what was saved."""
        saved = self.skip._get()  # noqa: SLF001 - it is the skip's other half
        return saved if value is NOTHING else (value, saved)

    def extra_repr(self) -> str:
        """Its name."""
        return repr(self.skip.name)


@functools.cache
def _keep_out_of_compiled_code() -> None:
    """``torch.compile`` leaves saving and loading alone; said with the first skip, as it takes seconds."""
    for kind in (SaveSkip, LoadSkip):
        kind.forward = torch.compiler.disable(kind.forward)  # type: ignore[method-assign]


class Carried(NamedTuple):
    """Value of a layer or stage, and the skips beside it by their number."""

    value: Any
    skips: dict[int, Any]
