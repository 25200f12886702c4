"""The papers' models by name, and the example.

Invariant: a preset's parameter count is its paper's if that gives one (``tests/models/test_presets.py``).
What a paper leaves open is chosen here, as follows:

* Hanayo §5 gives layers, heads and hidden size; vocabulary and positions are those of the Chimera models.
* WPipe A.2 gives hidden size, heads and a *sequence* of 128: its BERTs keep BERT's 512 positions, and samples
  have 128 tokens. With BERT's own heads 192 blocks make 1.4 and 768 make 5.5 billion parameters, as it says.
* WPipe gives the depth of its ResNeXts but not how the blocks are split. 3·blocks + 2 is 200, 302, 500
  and 800 for 66, 100, 166 and 266 blocks. ResNet-200 has (3, 24, 36, 3) (He et al. 2016); the deeper ones
  keep the 3 blocks at each end and the 2 : 3 of the middle groups, which published deep ResNets grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.errors import ConfigError, hint

from .bert import BERTConfig
from .gpt import GPTConfig
from .parts import INITIAL_DEVIATION
from .resnext import ResNeXtConfig
from .shapes import SHAPES, Family, Shape

ModelConfig = GPTConfig | BERTConfig | ResNeXtConfig
"""Shape of a model: ``build()`` returns its layers, ``sample()`` random data, ``loss()`` its loss."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model.

    Attributes:
        name: name of the model.
        config: its shape.
        source: the paper it comes from.
        sequence: tokens of a sample in that paper's runs; None: the model's positions, or no tokens at all.
    """

    name: str
    config: ModelConfig
    source: str
    sequence: int | None = None


def _language(name: str, shape: Shape) -> Preset:
    names = ("layers", "hidden", "heads", "positions", "vocabulary", "dropout")
    numbers = {key: getattr(shape, key) for key in names}
    config: ModelConfig
    if shape.family is Family.BERT:
        config = BERTConfig(**numbers)
    else:
        config = GPTConfig(**numbers, deviation=shape.deviation or INITIAL_DEVIATION)
    return Preset(name, config, shape.source, shape.sequence)


def _resnext(blocks: tuple[int, ...], width: int, source: str) -> Preset:
    config = ResNeXtConfig(blocks, width=width)
    return Preset(f"resnext-{config.depth}", config, source)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        *(_language(name, shape) for name, shape in SHAPES.items()),
        _resnext((3, 4, 6, 3), 4, "Xie et al. 2017, 32×4d; WPipe, Table 2"),
        _resnext((3, 4, 23, 3), 8, "Xie et al. 2017, 32×8d; WPipe, Table 2"),
        _resnext((3, 24, 36, 3), 4, "WPipe, appendix A.2"),
        _resnext((3, 38, 56, 3), 4, "WPipe, appendix A.2"),
        _resnext((3, 64, 96, 3), 4, "WPipe, appendix A.2"),
        _resnext((3, 104, 156, 3), 4, "WPipe, appendix A.2"),
    )
}


def preset(name: str) -> Preset:
    """The model of that name.

    Raises:
        ConfigError: the model is unknown.

    >>> preset("resnext-302").config
    ResNeXtConfig(blocks=(3, 38, 56, 3), groups=32, width=4, classes=1000, channels=3, planes=64,
        small_images=False, norm=<Norm.BATCH: 'batch'>)
    """
    known = PRESETS.get(name)
    if known is None:
        raise ConfigError(f"unknown model {name!r}{hint(name, PRESETS)}")
    return known
