"""A layout as text, ``Et*3|(tt|)*29,m|L``: letters are layers, ``|`` begins the next stage, ``*n`` repeats.

A group in parentheses is repeated as a whole and contains no other group; commas and blanks mean nothing.
Invariant: ``signs(written(stages)) == "|".join(stages)``, and of equal stages the text is always the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from counterflow.errors import ConfigError

LETTERS = "EtmL"

_MOST = 10_000
_MOST_TIMES = 10**9
"""Layers and stages of a layout, together."""

_TOKEN = re.compile(r"([EtmL|()])(?:[\s,]*\*[\s,]*([0-9]+))?[\s,]*")
_BLANKS = re.compile(r"[\s,]*")

_SIGNS = f"{', '.join(LETTERS)}, | or ("


def signs(text: str) -> str:
    """A layout's letters and ``|``, with everything repeated as often as it says.

    Raises:
        ConfigError: it reads otherwise; the message says at which character, counted from 1.

    >>> signs("Et*3|(t,m|)*2L")
    'Ettt|tm|tm|L'
    """
    letters: list[str] = []
    group: list[str] | None = None
    opened, count = 0, 0
    place = _BLANKS.match(text).end()  # type: ignore[union-attr]
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise _wrong(text, place, _expected(text, place, in_group=group is not None))
        sign, times = token[1], token[2]
        if sign == "(":
            if group is not None:
                raise _wrong(text, place, f"{', '.join(LETTERS)}, | or ): a group contains no other group")
            if times is not None:
                raise _wrong(text, text.index("*", place), "the layers of the group")
            group, opened = [], place
        elif sign == ")":
            if not group:
                raise _wrong(text, place, _SIGNS if group is None else "the layers of the group")
            if times is None:
                raise _wrong(text, token.end(), "*n, which says how often the group is repeated")
            count += len(group) * (_repetitions(times) - 1)
            _refuse_many(text, count)
            letters += group * _repetitions(times)
            group = None
        else:
            count += _repetitions(times)
            _refuse_many(text, count)
            (letters if group is None else group).extend(sign * _repetitions(times))
        place = token.end()
    if group is not None:
        raise _wrong(text, len(text), f") and *n, which end the group that begins at character {opened + 1}")
    return "".join(letters)


def written(stages: Sequence[str]) -> str:
    """The shortest text of these stages; of several, the one with the fewest groups.

    >>> written(["Ettt", *["tt"] * 29, "m", "L"]), written(["E", "", "t", "L"])
    ('Et*3|(tt|)*29,m|L', 'E||t|L')
    """
    shown = [_stage(stage) for stage in stages]
    pieces = [*(stage + "|" for stage in shown[:-1]), *shown[-1:]]
    texts = []
    place = 0
    for period, times in _folds(pieces):
        block = "".join(pieces[place : place + period])
        texts.append(block if times == 1 else f"({block})*{times}")
        place += period * times
    return _joined(texts)


def _stage(letters: str) -> str:
    runs = [(letter, len(list(same))) for letter, same in groupby(letters)]
    return _joined([letter * n if n < 3 else f"{letter}*{n}" for letter, n in runs])


def _joined(texts: Sequence[str]) -> str:
    """Texts in a row; a comma sets a number apart from the letter or group after it."""
    joined = ""
    for text in texts:
        joined += "," + text if joined[-1:].isdigit() and text[:1] not in ("", "|") else text
    return joined


_LONGEST_PERIOD = 64
"""Stages of a group, at most."""


def _folds(pieces: Sequence[str]) -> list[tuple[int, int]]:
    best: list[tuple[int, int]] = [(0, 0)] * (len(pieces) + 1)  # length of the text, groups in it
    chosen: list[tuple[int, int]] = [(1, 1)] * len(pieces)
    same = [0] * (_LONGEST_PERIOD + 1)  # by period, pieces from here on that equal the one a period later
    for place in reversed(range(len(pieces))):
        length, groups = best[place + 1]
        best[place] = length + len(pieces[place]), groups
        block = 0
        for period in range(1, min(_LONGEST_PERIOD, len(pieces) - place - 1) + 1):
            block += len(pieces[place + period - 1])
            same[period] = same[period] + 1 if pieces[place] == pieces[place + period] else 0
            times = same[period] // period + 1
            if times == 1:
                continue
            after = place + period * times
            length, groups = best[after]
            comma = after < len(pieces) and pieces[after][:1] not in ("", "|")
            with_group = length + block + len(f"()*{times}") + comma, groups + 1
            if with_group < best[place]:
                best[place], chosen[place] = with_group, (period, times)
    folds = []
    place = 0
    while place < len(pieces):
        period, times = chosen[place]
        folds.append((period, times))
        place += period * times
    return folds


def _repetitions(times: str | None) -> int:
    if times is None:
        return 1
    # No layout needs ten digits: all such numbers are one that is too large.
    return int(times) if len(times.lstrip("0")) < 10 else _MOST_TIMES


def _expected(text: str, place: int, *, in_group: bool) -> str:
    before = text[:place].rstrip(", \t\n")
    if text[place] == "*" and before and not before[-1].isdigit() and before[-1] != "(":
        return "a whole number after *"
    return f"{_SIGNS[:-1]})" if in_group else _SIGNS


def _wrong(text: str, place: int, expected: str) -> ConfigError:
    got = repr(text[place]) if place < len(text) else "the end"
    return ConfigError(f"layout {shortened(text)}: at character {place + 1} expected {expected}, got {got}")


def _refuse_many(text: str, count: int) -> None:
    if count > _MOST:
        has = f"{count:,}" if count < _MOST_TIMES else f"{_MOST_TIMES:,} or more"
        raise ConfigError(
            f"layout {shortened(text)}: has {has} layers and stages; at most {_MOST:,} are read"
        )


def shortened(text: str) -> str:
    """A layout in a message, in quotes."""
    return repr(text if len(text) <= 80 else text[:79] + "…")
