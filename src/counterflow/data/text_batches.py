"""Mini-batches of a byte-level text: the next byte for GPT, masked bytes for BERT.

Invariant: a sample is a pure function of (seed, step, its index in the mini-batch). So all workers of a
pipeline group read the same samples, replicas read different ones, and the whole mini-batch does not depend
on the number of replicas: replica r of W reads the r-th of W contiguous slices.

The last 5 % of the text are kept for validation: no training sample reads them, no validation sample
reads anything else. There are no epochs: windows start anywhere, drawn with replacement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from counterflow.errors import ConfigError

from .text import BYTE_VALUES

Tensors = torch.Tensor | tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
"""Inputs of a model: one tensor or several, each with one row per sample."""

Batch = tuple[Tensors, torch.Tensor]
"""Inputs and targets."""

IGNORED = -100
"""Target of a position without a loss, which ``torch.nn.functional.cross_entropy`` ignores."""

MASK = BYTE_VALUES
"""The token that stands for a masked byte."""

_VALIDATION_SHARE = 20  # one byte in 20
_CHOSEN = 0.15  # of a sample's tokens (Devlin et al. 2019, section 3.1)
_MASKED, _REPLACED = 0.8, 0.1  # of the chosen tokens; the rest are unchanged
_KEYS = 2**32  # a key is 32 bits, so no two (seed, step, sample) make the same stream
VALIDATION_STEP = _KEYS - 1

_Bytes = npt.NDArray[np.uint8]
_Tokens = npt.NDArray[np.int64]
_Batch = TypeVar("_Batch")


class TextBatches(Protocol):
    """Mini-batches by number; two calls with the same arguments give the same tensors."""

    @property
    def vocabulary(self) -> int:
        """Token ids are 0 to this number less 1."""

    @property
    def positions(self) -> int:
        """Tokens of a sample."""

    def batch(self, step: int, samples: int, *, replica: int = 0, replicas: int = 1) -> Batch:
        """One replica's part of mini-batch ``step``.

        Args:
            step: number of the mini-batch, 0 or more.
            samples: samples per replica, 1 or more.
            replica: number of the replica that reads, from 0.
            replicas: number of replicas (W).

        Raises:
            ConfigError: a number is out of range.
        """

    def validation(self, samples: int, *, replica: int = 0, replicas: int = 1) -> Batch:
        """One replica's part of the fixed validation batch, which depends neither on a step nor on the
        seed.
        """


class _OfText(ABC, Generic[_Batch]):
    ahead: int
    """Number of bytes of a window beyond a sample's positions."""
    vocabulary: int

    def __init__(self, text: bytes, positions: int, *, seed: int = 0, name: str = "the text") -> None:
        """Split ``text`` into training and validation part.

        Args:
            text: result of ``read_text``.
            positions: bytes of a sample, 1 or more.
            seed: 0 to 2³² − 1.
            name: name of the text in errors.

        Raises:
            ConfigError: a number is out of range, or the text is too short for ``positions``.
        """
        in_range("positions", positions, 1)
        self._windows = _split(text, positions + self.ahead, name)
        self._seed = in_range("seed", seed, 0)
        self.positions = positions

    def batch(self, step: int, samples: int, *, replica: int = 0, replicas: int = 1) -> _Batch:
        """One replica's part of mini-batch ``step``; see ``TextBatches.batch``."""
        in_range("step", step, 0, VALIDATION_STEP - 1)
        streams = [stream(self._seed, step, sample) for sample in part_of(samples, replica, replicas)]
        return self._batch_of(
            self._windows.at_random([int(drawn.random_raw()) for drawn in streams]), streams
        )

    def validation(self, samples: int, *, replica: int = 0, replicas: int = 1) -> _Batch:
        """Windows evenly spread over the validation part, always the same; see ``TextBatches.validation``."""
        chosen = part_of(samples, replica, replicas)
        windows = self._windows.spread(chosen, samples * replicas)
        return self._batch_of(windows, [stream(0, VALIDATION_STEP, sample) for sample in chosen])

    @abstractmethod
    def _batch_of(self, windows: _Tokens, streams: Sequence[np.random.PCG64]) -> _Batch:
        pass


class NextByte(_OfText[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text, in which each byte is predicted from those before it (GPT).

    Inputs and targets are int64 of shape [samples, positions]; a target is the byte after its input.

    >>> inputs, targets = NextByte(b"ab" * 50, positions=3).batch(0, 2)
    >>> bool((inputs[:, 1:] == targets[:, :-1]).all())
    True
    """

    ahead, vocabulary = 1, BYTE_VALUES

    def _batch_of(
        self, windows: _Tokens, _streams: Sequence[np.random.PCG64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(windows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class MaskedByte(_OfText[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]):
    """Windows of a text with some bytes hidden, which are predicted from all others (BERT).

    Inputs are (token ids, segment ids), both int64 of shape [samples, positions]; there is one segment,
    number 0. 15 % of a sample's bytes are chosen, at least one and equally many in every sample, so a mean
    over samples is a mean over chosen bytes too. 80 % of those become the mask token 256, 10 % any byte, 10 %
    are unchanged. Targets are the true bytes if chosen, otherwise −100.

    Source: Devlin et al. 2019 (BERT), section 3.1, without the next-sentence task.
    """

    ahead, vocabulary = 0, BYTE_VALUES + 1

    def _batch_of(
        self, windows: _Tokens, streams: Sequence[np.random.PCG64]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        targets = np.full_like(windows, IGNORED)
        everywhere = np.arange(windows.shape[1])
        for window, target, drawn in zip(windows, targets, streams, strict=True):
            hide(window, target, everywhere, drawn, mask=MASK, tokens=BYTE_VALUES)
        tokens = torch.from_numpy(windows)
        return (tokens, torch.zeros_like(tokens)), torch.from_numpy(targets)


@dataclass(frozen=True, slots=True, eq=False)
class _Windows:
    training: _Bytes
    held_back: _Bytes
    length: int

    def at_random(self, draws: Sequence[int]) -> _Tokens:
        """Training windows, one per draw (a 64-bit random number)."""
        starts = self.training.size - self.length + 1
        return self._read(self.training, [draw % starts for draw in draws])

    def spread(self, chosen: range, total: int) -> _Tokens:
        """The windows numbered ``chosen`` of ``total`` evenly spread validation windows."""
        starts = self.held_back.size - self.length + 1
        return self._read(self.held_back, [number * starts // total for number in chosen])

    def _read(self, part: _Bytes, starts: list[int]) -> _Tokens:
        return part[np.array(starts)[:, None] + np.arange(self.length)].astype(np.int64)


def _split(text: bytes, length: int, name: str) -> _Windows:
    if len(text) < 2 * length:
        raise ConfigError(
            f"{name}: {len(text)} bytes are too short: a sample reads {length} bytes, and training and "
            f"validation need one each, so {2 * length} or more; give a longer text or fewer positions"
        )
    data = np.frombuffer(text, np.uint8)
    held_back = max(length, data.size // _VALIDATION_SHARE)
    return _Windows(data[:-held_back], data[-held_back:], length)


def in_range(name: str, value: int, least: int, most: int = _KEYS - 1) -> int:
    """The value, if it is in its range.

    Raises:
        ConfigError: the value is out of its range.
    """
    if not least <= value <= most:
        raise ConfigError(f"{name}={value}: must be {least} to {most}")
    return value


def part_of(samples: int, replica: int, replicas: int) -> range:
    """The mini-batch's samples that one replica reads."""
    in_range("samples", samples, 1)
    in_range("replicas", replicas, 1, _KEYS // samples)
    in_range("replica", replica, 0, replicas - 1)
    return range(replica * samples, (replica + 1) * samples)


def stream(seed: int, step: int, sample: int) -> np.random.PCG64:
    """The random bits of one sample.

    The raw bits are used because numpy guarantees the bits of a bit generator for ever, but not the numbers
    that a ``Generator`` makes of them.
    """
    return np.random.PCG64(np.random.SeedSequence((seed, step, sample)))


def hide(
    sample: _Tokens, target: _Tokens, places: _Tokens, drawn: np.random.PCG64, *, mask: int, tokens: int
) -> None:
    """Hide some tokens of a sample, in place, and write the true ones into its target.

    Source: Devlin et al. 2019 (BERT), section 3.1.

    Args:
        sample: token ids.
        target: receives the true ids of the chosen tokens.
        places: places that may be chosen.
        drawn: the sample's random bits.
        mask: the token that stands for a hidden one.
        tokens: number of tokens that may replace a hidden one.
    """
    count = min(len(places), max(1, round(_CHOSEN * len(places))))
    chosen = places[np.argsort(drawn.random_raw(len(places)), kind="stable")[:count]]
    fate = drawn.random_raw(count) / 2**64
    any_token = (drawn.random_raw(count) % tokens).astype(np.int64)
    target[chosen] = sample[chosen]
    kept_or_any = np.where(fate < _MASKED + _REPLACED, any_token, sample[chosen])
    sample[chosen] = np.where(fate < _MASKED, mask, kept_or_any)
