"""Parameters and saved buffers of a layer, as they were when its pipeline was made.

Optimizers, gradients and states are made for these. Others would be trained by nobody, and saved nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import is_

from torch import Tensor, nn

from counterflow.capture.layer import CapturedLayer
from counterflow.capture.tracing_internals import transient_buffers_of
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.torch_private import buffers_of, children_of, parameters_of
from counterflow.errors import ConfigError

from .named_layer import NamedLayer, place_of


class WeightTables:
    """Tables of weights of a layer of this worker.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: NamedLayer) -> None:
        self._layer = layer
        self._entries = dict(_entries(layer.module))
        self._tables = _tables(layer.module)

    def refuse_changes(self) -> None:
        """Refuse other contents. Modules without any may be replaced.

        Raises:
            ConfigError: a parameter or a saved buffer was replaced, added or removed.
        """
        if all(_same(view, values) for view, values in self._tables):
            return
        before, now = self._entries, dict(_entries(self._layer.module))
        for name in dict.fromkeys((*now, *before)):
            if name not in before or name not in now or now[name] is not before[name]:
                change = "removed" if name not in now else "replaced" if name in before else "added"
                raise ConfigError(
                    f"{name} of {place_of(self._layer)} was {change} after the pipeline was made, which "
                    "trains and saves what it was made with; change numbers in place, or make a new pipeline"
                )
        self._tables = _tables(self._layer.module)


def _same(now: Collection[object], before: Sequence[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _opened(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # Recordings follow changes of what captured layers hold themselves.
    for path, module in layer.named_modules(remove_duplicate=False):
        if not isinstance(module, CapturedLayer):
            yield path, module


def _entries(layer: nn.Module) -> Iterator[tuple[str, object]]:
    # None for saved buffers: forwards may replace their tensors.
    for path, module in _opened(layer):
        prefix = f"{path}." if path else ""
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                yield prefix + name, None if is_dtensor(parameter) else parameter
        for name in buffers_of(module).keys() - transient_buffers_of(module):
            yield prefix + name, None


def _tables(layer: nn.Module) -> list[tuple[Collection[object], tuple[object, ...]]]:
    views: list[Collection[object]] = []
    for _, module in _opened(layer):
        parameters = parameters_of(module).values()
        if not any(isinstance(parameter, Tensor) and is_dtensor(parameter) for parameter in parameters):
            views.append(parameters)
        views += children_of(module).values(), buffers_of(module).keys()  # forwards replace buffers
    return [(view, tuple(view)) for view in views]
