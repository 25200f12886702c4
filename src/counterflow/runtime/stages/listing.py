"""A user's layers while a pipeline trains them: what is put there later would not run, or not be trained.

Invariant: before each step, evaluation and prediction the list has the modules with which the pipeline was
made, so a replaced layer is refused; before each step, so are other parameters and saved buffers in a layer.
What the user changes otherwise counts by itself, as stages run the user's own modules. Lists of models whose
layers a function lists are not watched here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from counterflow.capture.model_layers import ListLayers, Model, refuse_root
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

from .named_layer import NamedLayer
from .weight_tables import WeightTables


class Listing:
    """The layers of a sequential or a list, as they were when the pipeline was made.

    Args:
        model: a sequential, a list of modules, or a model that ``list_layers`` lists.
        list_layers: function that lists the layers of ``model``; None: they are its own.
        local_layers: layers with weights of this worker's stages.
    """

    def __init__(
        self, model: Model, list_layers: ListLayers | None, local_layers: Iterable[NamedLayer]
    ) -> None:
        self._model = model if list_layers is None else None
        self._layers = [] if list_layers is not None else list(_modules(model))
        self._weights = [WeightTables(layer) for layer in local_layers]

    def refuse_other_weights(self) -> None:
        """Refuse other parameters and saved buffers within this worker's layers.

        Raises:
            ConfigError: one was replaced, added or removed.
        """
        for tables in self._weights:
            tables.refuse_changes()

    def refuse_changes(self) -> None:
        """Refuse another layer, and hooks or a forward of the whole model.

        Raises:
            ConfigError: the list has changed.
        """
        model = self._model
        if model is None:
            return
        layers = _modules(model)
        if layers != self._layers and (isinstance(model, nn.Module) or len(layers) == len(self._layers)):
            self._refuse(layers)
        if isinstance(model, nn.Module):
            refuse_root(model)

    def _refuse(self, layers: Sequence[nn.Module]) -> None:
        pairs = zip(layers, self._layers, strict=False)
        index = next((i for i, (new, old) in enumerate(pairs) if new is not old), None)
        if index is None:
            change = f"the model has {plural(len(layers), 'layer')} now, and had {len(self._layers)}"
        else:
            new, old = type(layers[index]).__name__, type(self._layers[index]).__name__
            change = f"layer {index} of the model is another {new} now, where a {old} was"
        raise ConfigError(
            f"{change} when the pipeline was made, so no stage would run it; change the layer itself, or "
            "make a new pipeline"
        )


def _modules(model: Model) -> list[nn.Module]:
    return list(model)  # type: ignore[arg-type]
