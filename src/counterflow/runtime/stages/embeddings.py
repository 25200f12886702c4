"""Embeddings with options of torch's that do not go with every schedule and precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from counterflow.errors import ConfigError

from .named_layer import NamedLayer


@dataclass(frozen=True, slots=True)
class Setting:
    """Schedule and precision in which embeddings are trained.

    Attributes:
        scheme: name of the scheme.
        flushes: True if the scheme is synchronous.
        copies: number of copies in all replicas, by stage.
        tied: names of weights that several stages share.
        compute_dtype: option of ``Execution``.
    """

    scheme: str
    flushes: bool
    copies: Sequence[int]
    tied: Collection[str]
    compute_dtype: str | None

    def refuse(self, layers_of: Sequence[Sequence[NamedLayer]]) -> None:
        """Refuse embeddings whose training would differ from one process, or end with an error.

        Args:
            layers_of: layers by stage.

        Raises:
            ConfigError: there is such an embedding.
        """
        for stage, layers in enumerate(layers_of):
            for layer in layers:
                for name, module in layer.module.named_modules():
                    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                        place = f"layer {layer.index} ({type(layer.module).__name__})"
                        weight = layer.names.get(f"{name}.weight" if name else "weight", name)
                        self._refuse(module, place, weight, stage)

    def _refuse(self, module: nn.Embedding | nn.EmbeddingBag, place: str, weight: str, stage: int) -> None:
        if module.sparse and self.compute_dtype is not None:
            raise ConfigError(
                f"{place} has an embedding with sparse=True, whose gradients cannot be cast, as "
                "compute_dtype does; leave out sparse=True, or take autocast"
            )
        if module.max_norm is None:
            return
        if not self.flushes:
            why = f"{self.scheme} keeps several versions of it, of which one would be changed"
        elif self.copies[stage] > 1:
            why = f"each of the {self.copies[stage]} copies of stage {stage} would change its own"
        elif weight in self.tied:
            why = f"{weight} is a weight of other stages too, where it would stay"
        elif self.compute_dtype is not None:
            why = "compute_dtype puts a copy in its place, which would be changed instead"
        else:
            return
        raise ConfigError(
            f"{place} has an embedding with max_norm={module.max_norm:g}, which changes its weight in a "
            f"forward, and {why}; leave out max_norm, and let a hook after the optimizer's step keep norms"
        )
