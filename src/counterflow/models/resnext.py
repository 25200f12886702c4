"""ResNeXt: a stem, bottleneck blocks with grouped convolutions, and a classifier; a list of layers.

Invariant: every layer accepts and returns one tensor. With batch normalisation a sample's result depends on
its micro-batch (as in the papers' runs), so a pipeline equals one process only if that one normalises over
the same micro-batches; ``Norm.GROUP`` has the same number of parameters and keeps samples independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.errors import ConfigError

from .loss import classification_loss
from .parts import require_at_least

_EXPANSION = 4
"""Channels of a block's output for each of its group's base channels."""


class Norm(Enum):
    """Values that are normalised together: the micro-batch's samples, or groups of channels of one sample."""

    BATCH = "batch"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class ResNeXtConfig:
    """The shape of a ResNeXt; it has 3 · blocks + 2 layers as the paper counts.

    Attributes:
        blocks: blocks of each group of equal resolution; every group but the first halves the resolution.
        groups: cardinality, the groups of each block's middle convolution.
        width: channels of each of these groups in the first group of blocks; doubled from one group of blocks
            to the next.
        classes: number of classes.
        channels: channels of an image: 3 for colour, 1 for grey.
        planes: channels of the stem; a block of the first group returns four times as many.
        small_images: whether the stem keeps the resolution, for images of about 8 to 64 pixels; otherwise the
            stem divides it by 4.
        norm: the kind of normalisation.

    Raises:
        ConfigError: the shape cannot be built.

    >>> digits = ResNeXtConfig((1, 1), groups=4, classes=10, channels=1, planes=16, small_images=True)
    >>> [type(layer).__name__ for layer in digits.build()]
    ['Stem', 'ResnextBlock', 'ResnextBlock', 'ResnextHead']
    """

    blocks: tuple[int, ...]
    groups: int = 32
    width: int = 4
    classes: int = 1000
    channels: int = 3
    planes: int = 64
    small_images: bool = False
    norm: Norm = Norm.BATCH

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError("blocks=(): give the blocks of at least one group")
        require_at_least(1, blocks=min(self.blocks), groups=self.groups, width=self.width)
        require_at_least(1, classes=self.classes, channels=self.channels, planes=self.planes)

    @property
    def depth(self) -> int:
        """The number in the model's name: three convolutions per block, the stem's and the classifier.

        >>> ResNeXtConfig((3, 4, 6, 3)).depth
        50
        """
        return 3 * sum(self.blocks) + 2

    def build(self) -> list[nn.Module]:
        """The layers, on torch's default device and in its default dtype at the time of the call."""
        layers: list[nn.Module] = [Stem(self)]
        inputs = self.planes
        for group, blocks in enumerate(self.blocks):
            outputs = _EXPANSION * self.planes * 2**group
            for block in range(blocks):
                stride = 2 if group > 0 and block == 0 else 1
                middle = self.groups * self.width * 2**group
                layers.append(ResnextBlock(self, inputs, middle, outputs, stride))
                inputs = outputs
        return [*layers, ResnextHead(inputs, self.classes)]

    def sample(
        self,
        samples: int,
        pixels: int | None = None,
        *,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Random images [samples, channels, pixels, pixels] and their classes [samples], int64.

        Args:
            samples: number of samples.
            pixels: an image's height and width; None: 224, or 32 for small images.
            device: device of the tensors; on ``meta`` they have only a shape.
            generator: source of randomness; None: torch's own.
        """
        side = pixels or (32 if self.small_images else 224)
        images = torch.randn((samples, self.channels, side, side), device=device, generator=generator)
        return images, torch.randint(self.classes, (samples,), device=device, generator=generator)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The model's loss, :func:`~counterflow.models.loss.classification_loss`."""
        return classification_loss(output, target)


class Convolution(nn.Conv2d):
    """A convolution without a bias that keeps the resolution except for its stride; He's initialisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class Stem(nn.Module):
    """Images [samples, channels, height, width] to the first block's input."""

    def __init__(self, config: ResNeXtConfig) -> None:
        super().__init__()
        if config.small_images:
            self.convolution = Convolution(config.channels, config.planes, 3)
        else:
            self.convolution = Convolution(config.channels, config.planes, 7, stride=2)
        self.norm = _norm(config.norm, config.planes)
        self.pool = nn.Identity() if config.small_images else nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """[samples, planes, …]: the resolution unchanged, or divided by 4."""
        output: Tensor = self.pool(functional.relu(self.norm(self.convolution(images)), inplace=True))
        return output


class ResnextBlock(nn.Module):
    """A bottleneck: 1×1, grouped 3×3 with the stride, 1×1, added to the input."""

    def __init__(self, config: ResNeXtConfig, inputs: int, middle: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = Convolution(inputs, middle, 1)
        self.reduce_norm = _norm(config.norm, middle)
        self.grouped = Convolution(middle, middle, 3, stride, config.groups)
        self.grouped_norm = _norm(config.norm, middle)
        self.expand = Convolution(middle, outputs, 1)
        self.expand_norm = _norm(config.norm, outputs)
        fits = stride == 1 and inputs == outputs
        self.shortcut = None if fits else Convolution(inputs, outputs, 1, stride)
        self.shortcut_norm = None if fits else _norm(config.norm, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """[samples, inputs, height, width] to [samples, outputs, height/stride, width/stride]."""
        inside = functional.relu(self.reduce_norm(self.reduce(images)), inplace=True)
        inside = functional.relu(self.grouped_norm(self.grouped(inside)), inplace=True)
        inside = self.expand_norm(self.expand(inside))
        if self.shortcut is not None and self.shortcut_norm is not None:
            images = self.shortcut_norm(self.shortcut(images))
        return functional.relu(inside + images, inplace=True)


class ResnextHead(nn.Module):
    """The mean over all pixels and the classifier: logits [samples, classes]."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """[samples, inputs, height, width] to [samples, classes]."""
        output: Tensor = self.classifier(images.mean(dim=(2, 3)))
        return output


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind is Norm.BATCH:
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(32, channels), channels)
