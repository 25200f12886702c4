"""State that a layer passes on to the next slice of its micro-batch: keys and values, a recurrence, an edge.

A ``Carry`` is a submodule of the layer, but does not store the state between slices: the state passes through
the stage beside its value, like that of a skip connection (``api/skip.py``), from the run of one
slice to that of the next; so recomputation, split backwards and precision treat it as inputs and outputs.

Invariant: outside of a sliced run nothing is carried, and the same layer sees the whole sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ..common.trees import versions
from ..errors import ConfigError
from .attention_parts import SavedKeys
from .contexts import Context, positions_of_share
from .torch_internals import in_backward

NOTHING = object()
"""Placeholder for a state that does not exist."""


class Carry(nn.Module):
    """A layer's state between the slices of a micro-batch; a submodule of the layer, without weights.

    In its forward the layer takes the state of the slice before, and leaves one for the next slice: tensors,
    numbers and None in tuples, lists and dicts. Gradients go back the same way. If the whole sequence runs at
    once, in one process or without slices, no state exists to take, and a state that is left is dropped.

    >>> class Sums(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.carry = Carry()
    ...
    ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
    ...         sums = x.cumsum(1) + self.carry.take(0)
    ...         self.carry.leave(sums[:, -1:])
    ...         return sums
    >>> Sums()(torch.ones(1, 3)).tolist()
    [[1.0, 2.0, 3.0]]
    """

    def __init__(self) -> None:
        _keep_out_of_compiled_code()
        super().__init__()
        self._incoming: Any = NOTHING
        self._outgoing: Any = NOTHING
        self._versions: list[int] = []
        self._runs = self._expected = False
        """Whether this run is one of a slice, and whether any will be."""
        self._joins = False
        """Whether a state may be put together anew, as no gradient goes back to its parts."""
        self.context: Context | None = None
        """Positions of the mesh that share the layer's sequences; None: it is given whole ones, or slices."""

    def take(self, otherwise: Any = None) -> Any:
        """State from the slice before; ``otherwise`` if this is the first one, or the whole sequence.

        Raises:
            ConfigError: a user's own checkpoint asks for it again in the backward.
        """
        self._refuse_shares()
        return self.take_of_share(otherwise)

    def leave(self, state: Any) -> None:
        """Leave a state to the next slice.

        Args:
            state: tensors, numbers and None in tuples, lists and dicts, which must not be changed in place
                later. Leave a copy (``clone``) of a small part of a large tensor, as a view saves all of it.
        """
        self._refuse_shares()
        self.leave_of_share(state)

    def _refuse_shares(self) -> None:
        if self.context is not None:
            raise ConfigError(
                "a layer carries a state along the sequence, which cf.ContextParallel shares among "
                "positions of the mesh: only attention by cf.attend sees all of it; train without one of them"
            )

    def positions(
        self, length: int, start: int | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """Numbers, in the whole sequence, of the positions that the layer is given; for rotary embeddings.

        Args:
            length: number of positions in this run.
            start: number of positions that the layer was given in earlier slices; None: the carry counts
                them, if the layer leaves nothing else in it but by ``cf.attend``.
            device: device of the result.

        Returns:
            [length], integers.

        Raises:
            ConfigError: the layer left another state in the carry.

        >>> Carry().positions(3).tolist(), Carry().positions(3, start=4).tolist()
        ([0, 1, 2], [4, 5, 6])
        """
        start = self.count_positions(length) if start is None else start
        context = self.run_context
        if context is None:
            return torch.arange(start, start + length, device=device)
        return positions_of_share(length, context.share, device) + start * context.share.count

    def count_positions(self, length: int) -> int:
        """Count the positions of a run in the carry's state; return the number of those in earlier slices.

        Args:
            length: number of positions in this run.

        Raises:
            ConfigError: the layer left another state in the carry.
        """
        state = self.take_of_share(0)
        if isinstance(state, tuple) and all(isinstance(part, SavedKeys) for part in state):
            return sum(part.key.shape[2] for part in state)
        if not isinstance(state, int):
            raise ConfigError(
                "positions of slices are counted in a cf.Carry in which the layer leaves another state; give "
                "the layer a second cf.Carry for them, or say with start= how many were in earlier slices"
            )
        if self._outgoing is NOTHING:  # cf.attend leaves keys, whose number says it too
            self.leave_of_share(state + length)
        return state

    @property
    def run_context(self) -> Context | None:
        """Context of this run: of a slice, or of whole sequences; None: they are not shared."""
        return self.context.of_slice() if self.context is not None and self._runs else self.context

    @property
    def sliced(self) -> bool:
        """True if this run of the layer is one of a slice."""
        return self._runs

    @property
    def expects_slices(self) -> bool:
        """True if the layer is trained in slices; it may be evaluated in whole sequences."""
        return self._expected

    @property
    def joins(self) -> bool:
        """True if the states of slices may be concatenated, as nothing is saved for a backward."""
        return self._joins

    # -- states that are right on shares of slices too

    def take_of_share(self, otherwise: Any) -> Any:
        """Return the state from the slice before, as ``take``, on shares of sequences too."""
        return self._take(otherwise) if self._expected else otherwise

    def leave_of_share(self, state: Any) -> None:
        """Leave a state to the next slice, as ``leave``, on shares of sequences too."""
        if self._expected:
            self._leave(state)

    # -- kept out of compiled code, which would take what it finds for constants

    def _uncompiled(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def _within(
        self, enter: Callable[[], AbstractContextManager[dict[str, Any]]], function: Callable[..., Any],
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        with enter() as further:
            return function(*args, **{**kwargs, **further})

    def _take(self, otherwise: Any) -> Any:
        if not self._runs and in_backward():
            raise ConfigError(
                "a carried state is taken in a torch.utils.checkpoint, which would take it again in the "
                "backward, when it is another slice's; take it before, and hand it in"
            )
        return otherwise if self._incoming is NOTHING else self._incoming

    def _leave(self, state: Any) -> None:
        if self._runs:
            _set_state(self, "_outgoing", state)
            self._versions = versions(state)

    # -- for the stage

    def expect_slices(self, *, expected: bool) -> None:
        """Note whether the layer is going to be trained in slices."""
        self._expected = expected

    def begin(self, state: Any, *, joins: bool = False) -> None:
        """Begin the run of a slice; ``state`` is that of the slice before, or ``NOTHING``."""
        _set_state(self, "_incoming", state)
        self._outgoing, self._versions = NOTHING, []
        self._runs, self._joins = True, joins

    def end(self) -> Any:
        """End the run of a slice; return the state that it left, or ``NOTHING``.

        Raises:
            ConfigError: the state was changed in place.
        """
        state, before = self._outgoing, self._versions
        self._incoming, self._outgoing, self._versions, self._runs = NOTHING, NOTHING, [], False
        self._joins = False
        if state is not NOTHING and versions(state) != before:
            raise ConfigError(
                "a carried state was changed in place after it was left to the next slice; leave a copy"
            )
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin without a state."""
        return {
            **self.__dict__,
            "_incoming": None,
            "_outgoing": None,
            "_versions": [],
            "_runs": False,
            "_joins": False,
        }

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """``NOTHING`` is another object in every process."""
        _keep_out_of_compiled_code()
        self.__dict__.update({**state, "_incoming": NOTHING, "_outgoing": NOTHING})


def _set_state(carry: Carry, name: str, state: Any) -> None:
    # A state may be a parameter of the layer, which ``nn.Module`` would register as one of the carry.
    object.__setattr__(carry, name, state)


@functools.cache
def _keep_out_of_compiled_code() -> None:
    # Code that depends on slices is not compiled. Done with the first ``Carry``, as it takes seconds.
    for name in ("_take", "_leave", "_uncompiled"):
        setattr(Carry, name, torch.compiler.disable(getattr(Carry, name)))
    setattr(Carry, "_within", torch.compiler.disable(Carry._within, recursive=False))  # noqa: B010, SLF001
