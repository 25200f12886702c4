"""A layout: the layers of each stage, by kind.

Invariant: a layout that fits a model has its embedding first, its loss last, and its layers in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Self

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

from .layout_text import signs, written


class LayerKind(StrEnum):
    """A kind of layer, with its letter."""

    EMBEDDING = "E"
    TRANSFORMER = "t"
    MTP = "m"
    LOSS = "L"


Stage = tuple[LayerKind, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers of each stage, in Megatron-LM's notation.

    Megatron-LM places stage ``k`` as chunk ``k // pp`` on pipeline rank ``k % pp``; so do the scheme
    ``interleaved`` and, with one chunk, ``1f1b`` and ``gpipe``. Other schemes place these stages elsewhere.

    Attributes:
        stages: the kinds of the layers of each stage, in their order; a stage may be empty.

    >>> layout = Layout.read("Et*3|(tt|)*29,m|L")
    >>> len(layout.stages), layout.count(LayerKind.TRANSFORMER), str(layout)
    (32, 61, 'Et*3|(tt|)*29,m|L')
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a layout of no stages: expected one or more")

    @classmethod
    def read(cls, text: str) -> Self:
        """The layout that a string of Megatron-LM's ``--pipeline-model-parallel-layout`` says.

        Raises:
            ConfigError: it reads otherwise; the message says where.
        """
        return cls(tuple(tuple(map(LayerKind, stage)) for stage in signs(text).split("|")))

    @classmethod
    def of_cuts(cls, cuts: Sequence[int], layers: int, mtp: int = 0) -> Self:
        """The layout of a model that is cut so.

        Args:
            cuts: the layers at which each stage after the first begins, as ``cuts.explicit`` returns them.
            layers: of the model: an embedding, transformer layers, MTP layers and a head with the loss.
            mtp: how many of them are MTP layers.

        >>> str(Layout.of_cuts((3, 5), layers=8))
        'Ett|tt|ttL'
        """
        kinds = (
            LayerKind.EMBEDDING,
            *[LayerKind.TRANSFORMER] * (layers - mtp - 2),
            *[LayerKind.MTP] * mtp,
            LayerKind.LOSS,
        )
        return cls(tuple(kinds[first:end] for first, end in pairwise([0, *cuts, layers])))

    def __str__(self) -> str:
        """The shortest string of Megatron-LM that says the same."""
        return written(["".join(stage) for stage in self.stages])

    def count(self, kind: LayerKind) -> int:
        """Layers of a kind, in all stages."""
        return sum(stage.count(kind) for stage in self.stages)

    def refuse_misplaced(self) -> None:
        """Refuse an embedding that is not the first layer, a loss that is not the last, and layers after MTP.

        Raises:
            ConfigError: they stand elsewhere, or are there not once.
        """
        places = [(kind, number) for number, stage in enumerate(self.stages) for kind in stage]
        kinds = [kind for kind, _ in places]
        for kind, name, place in ((LayerKind.EMBEDDING, "embedding", 0), (LayerKind.LOSS, "loss", -1)):
            where = "first" if place == 0 else "last"
            if kinds.count(kind) != 1:
                raise ConfigError(
                    f"layout '{self}': expected one {name} ({kind}) as the {where} layer, got "
                    f"{kinds.count(kind)}"
                )
            if kinds[place] is not kind:
                number = places[kinds.index(kind)][1]
                raise ConfigError(
                    f"layout '{self}': expected the {name} ({kind}) as the {where} layer, got "
                    f"{kinds[place]}; the {name} is in stage {number}"
                )
        beyond = kinds.index(LayerKind.MTP) if LayerKind.MTP in kinds else len(kinds)
        if LayerKind.TRANSFORMER in kinds[beyond:]:
            number = places[kinds.index(LayerKind.TRANSFORMER, beyond)][1]
            raise ConfigError(
                f"layout '{self}': expected MTP layers (m) after all transformer layers (t), got t after m "
                f"in stage {number}"
            )

    def cuts(self, layers: int, *, mtp: int = 0, stages: int | None = None) -> tuple[int, ...]:
        """The cuts that make these stages of a model.

        Args:
            layers: of the model: an embedding, transformer layers, MTP layers and a head with the loss.
            mtp: how many of them are MTP layers.
            stages: how many stages are wanted; None: as many as the layout has.

        Raises:
            ConfigError: its layers are not the model's, it has another number of stages, or one is empty.

        >>> Layout.read("Ett|tt|ttL").cuts(layers=8)
        (3, 5)
        """
        self.refuse_misplaced()
        have, its_mtp = self.count(LayerKind.TRANSFORMER), self.count(LayerKind.MTP)
        if its_mtp != mtp:
            expected = f"the model's {mtp}" if mtp else "none, as the model has none"
            raise ConfigError(
                f"layout '{self}': has {its_mtp} MTP layer{'s' * (its_mtp != 1)} (m), expected {expected}; "
                f"counterflow layout '{self}' --mtp {mtp} re-derives it"
            )
        if have != layers - mtp - 2:
            raise ConfigError(
                f"layout '{self}': has {have} transformer layers (t), expected {layers - mtp - 2}: the model "
                f"has {plural(layers, 'layer')} with embedding and head; counterflow layout '{self}' "
                "--layers "
                f"{max(layers - mtp - 2, 0)} re-derives it"
            )
        if stages is not None and len(self.stages) != stages:
            raise ConfigError(
                f"layout '{self}': has {plural(len(self.stages), 'stage')}, expected {stages}; "
                "counterflow layout "
                f"'{self}' --stages {stages} re-derives it"
            )
        if () in self.stages:
            raise ConfigError(
                f"layout '{self}': stage {self.stages.index(())} is empty, and here each stage has one layer "
                "or more; give it a layer, or take a stage less"
            )
        return tuple(accumulate(len(stage) for stage in self.stages[:-1]))
