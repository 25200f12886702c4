"""Parts of a kind of layer: those that parallelism divides, and the tensors of its input.

Invariant: numbers are of the undivided layer; what a position has of it is computed in ``cost/positions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.errors import ConfigError

from .cluster import FORM, require_number


@dataclass(frozen=True, slots=True)
class Division:
    """The parts of a kind of layer that tensor parallelism divides; the rest is whole at every position.

    With T positions, each holds 1 − s + s/T of the bytes if a share s is divided. The divided part takes as
    many seconds as 1/T of the samples take on a whole layer, because a device with the same work is equally
    fast.

    Attributes:
        weights: share of the bytes of its weights, and of their gradients, casts and optimiser state.
        forward: share of a forward's seconds.
        backward: share of a backward's seconds, and of both halves of a split one.
        saved: share of the bytes that a forward saves for its backward, and of those between the halves.
        peaks: share of the memory of forwards and backwards while they run.
        forward_sums: number of all-reduces over the positions in a forward.
        backward_sums: number of all-reduces in a backward; in a split one they belong to the input gradient.
        sum_bytes: size of each all-reduce for one sample; None: the layer's output.
        overhead_seconds: additional time of a divided layer's forward for any size, and of its backward (in
            the first half): on a CPU, that of torch's DTensors.
        parts: a number that T has to divide, such as the number of attention heads; 0: any T.

    Raises:
        ConfigError: a share is above 1, or a number is negative.

    >>> Division(weights=1.5)
    Traceback (most recent call last):
    counterflow.errors.ConfigError: weights=1.5: is a share; must be 1 or less
    """

    __pydantic_config__ = FORM

    weights: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    saved: float = 0.0
    peaks: float = 0.0
    forward_sums: int = 0
    backward_sums: int = 0
    sum_bytes: float | None = None
    overhead_seconds: float = 0.0
    parts: int = 0

    def __post_init__(self) -> None:
        _require_shares(self, "weights", "forward", "backward", "saved", "peaks")
        _require_numbers(self, "forward_sums", "backward_sums", "overhead_seconds", "parts")
        if self.sum_bytes is not None:
            require_number("sum_bytes", self.sum_bytes)


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of a kind of layer; the rest of it, a router and shared experts too, is not among them.

    With a degree E, each position has ``count`` / E of them. It sends the tokens of its own samples to all
    positions and receives as many, so its experts compute as much as before if tokens are even.

    Attributes:
        count: number of experts, of which E is a divisor.
        weights_bytes: the part of the layer's ``weights_bytes`` that is all their weights.
        forward: share of a forward's seconds that is theirs.
        backward: share of a backward's seconds, and of both halves of a split one.
        saved: share of the bytes that a forward saves for its backward, and of those between the halves.
        peaks: share of the memory of forwards and backwards while they run.
        sent_bytes: size of the tokens of one sample, once for each expert that is chosen for a token. As many
            bytes return; a backward has the same two exchanges.
        load: tokens at the position with the most, for each at the average one; 1 if tokens are even.
        overhead_seconds: additional time of a forward that exchanges, for any size, and of its backward.

    Raises:
        ConfigError: there is no expert, a share is above 1, the load is below 1, or a number is negative.

    >>> Experts(8, 100.0, load=0.5)
    Traceback (most recent call last):
    counterflow.errors.ConfigError: load=0.5: the fullest position has the average or more; must be 1 or more
    """

    __pydantic_config__ = FORM

    count: int
    weights_bytes: float
    forward: float = 0.0
    backward: float = 0.0
    saved: float = 0.0
    peaks: float = 0.0
    sent_bytes: float = 0.0
    load: float = 1.0
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"count={self.count}: must be 1 expert or more")
        _require_shares(self, "forward", "backward", "saved", "peaks")
        _require_numbers(self, "weights_bytes", "sent_bytes", "load", "overhead_seconds")
        if self.load < 1:
            raise ConfigError(
                f"load={self.load:g}: the fullest position has the average or more; must be 1 or more"
            )


@dataclass(frozen=True, slots=True)
class Contexts:
    """Attention of a kind of layer, which positions that share its sequences gather keys and values for.

    Attributes:
        gathered_bytes: size of the keys and values of one sample's sequence.
        overhead_seconds: additional time of a forward that gathers, for any size, and of its backward.

    Raises:
        ConfigError: a number is negative.
    """

    __pydantic_config__ = FORM

    gathered_bytes: float = 0.0
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        _require_numbers(self, "gathered_bytes", "overhead_seconds")


@dataclass(frozen=True, slots=True)
class InputTensors:
    """Tensors of a layer's input, by number, of which a layer passes on some as they are.

    A tensor that several layers of a stage save, or pass on, exists once.

    Attributes:
        shares: share of each in the bytes of the input; 0: it is the user's mini-batch.
        saved: those that the forward saves for the backward.
        gradients: those that get a gradient.
        passed: pairs of an input's number and the output's that it is.
        saved_outputs: numbers of the other outputs that the forward saves.

    Raises:
        ConfigError: a number is negative, or there is no such input.

    >>> InputTensors((0.5, 0.5), saved=(2,))
    Traceback (most recent call last):
    counterflow.errors.ConfigError: saved=(2,): the layer has 2 input tensors, numbered from 0
    """

    __pydantic_config__ = FORM

    shares: tuple[float, ...]
    saved: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    passed: tuple[tuple[int, int], ...] = ()
    saved_outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for share in self.shares:
            require_number("shares", share)
        sources = tuple(source for source, _ in self.passed)
        count = len(self.shares)
        for name, numbers in (("saved", self.saved), ("gradients", self.gradients), ("passed", sources)):
            if any(not 0 <= number < count for number in numbers):
                raise ConfigError(
                    f"{name}={getattr(self, name)}: the layer has {count} input tensors, numbered from 0"
                )


def _require_numbers(part: Division | Experts | Contexts, *names: str) -> None:
    for name in names:
        require_number(name, getattr(part, name))


def _require_shares(part: Division | Experts, *names: str) -> None:
    _require_numbers(part, *names)
    for name in names:
        if getattr(part, name) > 1:
            raise ConfigError(f"{name}={getattr(part, name):g}: is a share; must be 1 or less")
