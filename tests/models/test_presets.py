"""The papers' models have the papers' sizes."""

from __future__ import annotations

import pytest
import torch

from counterflow.capture.model_layers import parameter_count
from counterflow.errors import ConfigError
from counterflow.models import PRESETS, BERTConfig, GPTConfig, ResNeXtConfig, preset

PUBLISHED = {
    "bert-48": (50, 669_790_012),
    "bert-48-mixpipe": (50, 669_933_442),
    "gpt-2": (66, 1_389_327_360),
    "gpt-72": (74, 1_010_477_056),
    "resnext-50": (18, 25_028_904),
    "resnext-101": (35, 88_791_336),
}
"""Layers in the list and parameters; the papers' own numbers, for the ResNeXts those of torchvision."""

COUNTED = {
    "example": (10, 436_864),
    "bert-64": (66, 5_206_041_404),
    "bert-96": (98, 728_928_572),
    "bert-192": (194, 1_409_364_284),  # "1.4 billion" (WPipe §1)
    "bert-384": (386, 2_770_235_708),
    "bert-768": (770, 5_491_978_556),  # "5.5 billion" (WPipe §1)
    "gpt-128": (130, 1_716_293_632),
    "resnext-200": (68, 64_473_384),
    "resnext-302": (102, 90_958_120),
    "resnext-500": (168, 143_362_344),
    "resnext-800": (268, 222_251_304),
}
"""What the papers give no number for, or a rounded one."""


@pytest.mark.parametrize(("name", "size"), [*PUBLISHED.items(), *COUNTED.items()])
def test_layers_and_parameters(name: str, size: tuple[int, int]) -> None:
    with torch.device("meta"):
        layers = preset(name).config.build()
    assert (len(layers), parameter_count(layers)) == size


def test_every_model_is_counted() -> None:
    assert PRESETS.keys() == PUBLISHED.keys() | COUNTED.keys()


def test_names_tell_the_depth() -> None:
    for name, known in PRESETS.items():
        assert known.name == name
        depth = name.split("-")[1] if "-" in name else ""
        if isinstance(known.config, ResNeXtConfig):
            assert depth == str(known.config.depth)
        elif name not in ("example", "gpt-2"):
            assert depth == str(known.config.layers)


def test_samples_of_the_papers_runs_fit() -> None:
    for known in PRESETS.values():
        if known.sequence is not None:
            assert isinstance(known.config, GPTConfig | BERTConfig)
            assert known.sequence <= known.config.positions


def test_the_example_can_be_cut_into_4_or_8() -> None:
    config = preset("example").config
    assert isinstance(config, GPTConfig)
    assert (config.layers, config.vocabulary, config.positions, config.dropout) == (8, 256, 64, 0)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'bert48'; did you mean 'bert-48'\?"):
        preset("bert48")
