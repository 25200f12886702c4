"""The colours are told apart by readers with every kind of colour vision, and in grey."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from counterflow.drawing import palette

Array = NDArray[np.float64]

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Ottosson's Oklab, in which distances are about as they are seen (white to black is 1).
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
DARK_PAPER = "#14161a"  # the page's, with a dark system theme


def linear(colour: str) -> Array:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def seen(colour: str, vision: str) -> Array:
    light = np.clip(np.array(VISIONS[vision]) @ linear(colour), 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ light)


def nearest(colours: list[str], vision: str) -> float:
    return min(float(np.linalg.norm(seen(a, vision) - seen(b, vision))) for a, b in combinations(colours, 2))


def luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(("lanes", "least"), [(2, 0.19), (4, 0.075), (8, 0.045)])
def test_colours_are_told_apart(vision: str, lanes: int, least: float) -> None:
    colours = [colour for hue in palette.HUES[:lanes] for colour in hue.shades[:2]]
    assert nearest(colours, vision) >= least


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(("lanes", "least"), [(1, 0.13), (2, 0.13), (4, 0.075), (8, 0.045)])
def test_weight_gradients_are_told_apart_too(vision: str, lanes: int, least: float) -> None:
    colours = [colour for hue in palette.HUES[:lanes] for colour in hue.shades]
    assert nearest(colours, vision) >= least


@pytest.mark.parametrize("vision", ["protanopia", "deuteranopia"])
def test_first_four_lanes_without_red_or_green_cones(vision: str) -> None:
    colours = [colour for hue in palette.HUES[:4] for colour in hue.shades[:2]]
    assert nearest(colours, vision) > 0.1


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("paper", [palette.BACKGROUND, DARK_PAPER])
def test_bubbles_differ_from_every_op(vision: str, paper: str) -> None:
    for hue in palette.HUES:
        assert nearest([paper, *hue.shades], vision) >= 0.12


def test_forward_and_backward_differ_in_grey() -> None:
    for hue in palette.HUES:
        assert contrast(hue.forward, hue.backward) >= 3
    lightest_backward = max(luminance(hue.backward) for hue in palette.HUES)
    assert lightest_backward < min(luminance(hue.forward) for hue in palette.HUES)


def test_weight_gradients_lie_between_them_in_grey() -> None:
    for hue in (*palette.HUES, palette.NEUTRAL):
        assert contrast(hue.forward, hue.weights) >= 1.6
        assert contrast(hue.weights, hue.backward) >= 1.6
    shades = [
        [luminance(colour) for colour in column]
        for column in zip(*(h.shades for h in palette.HUES), strict=True)
    ]
    light, dark, middle = shades
    assert max(dark) < min(middle)
    assert max(middle) < min(light)


def test_numbers_are_legible() -> None:
    for hue in palette.HUES:
        for colour, ink in zip(hue.shades, palette.INKS.shades, strict=True):
            assert contrast(colour, ink) >= 4.5


def test_hues_start_again() -> None:
    assert palette.hue(len(palette.HUES) + 1) == palette.HUES[1]
