"""Runs of a worker for the model's own forward: calls of modules that it owns, and whole stages.

Invariant: runs leave buffers and random states as they were. They see the stage's weights, precision and
random streams, as the runs of the schedule do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.aux_loss import added_losses
from counterflow.api.skip import Carried
from counterflow.capture.layer import CapturedLayer
from counterflow.common.containers import ContainerEntries, containers_in
from counterflow.common.tensors.torch_private import buffers_of, intercepted
from counterflow.common.trees import version_of

from ..messages.values import Value
from ..stages.attributes import restored_attributes
from ..stages.named_layer import NamedLayer
from ..stages.randomness import RandomStreams
from ..stages.sample_rows import SampleRows
from ..stages.stage import LocalStage
from ..stages.stage_wrappers import Run, StageWrapper
from .sketches import CallKey, CallSketch, Sketch, sketches_of
from .state import Repeats


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
        key: path of the module, its layer, and the number of the call.
        args: positional arguments.
        kwargs: keyword arguments.
        states: states of the generators after the layer's earlier draws; None: it has not drawn yet.
    """

    key: CallKey
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: Sequence[Tensor] | None


class ModuleResult(NamedTuple):
    """Result of a call of a module.

    Attributes:
        output: what it returns.
        terms: terms that it adds to the loss, by name.
        states: states of the generators after the call.
        changes: arguments that the call changed in place, by their number among the tensors.
        containers: lists and dicts to which it gave other entries, by their number among these.
    """

    output: Any
    terms: dict[str, Tensor]
    states: Sequence[Tensor]
    changes: dict[int, Tensor]
    containers: dict[int, Any]


class StageRun(NamedTuple):
    """A run of a stage.

    Attributes:
        stage: number of the stage.
        value: its input.
        repeats: whether each layer runs twice, to see whether it keeps state (``Repeats``).
    """

    stage: int
    value: Value
    repeats: bool = False


class StageResult(NamedTuple):
    """Result of a run of a stage.

    Attributes:
        value: its output.
        draws: whether a layer drew random numbers.
        stateful: the first layer whose second run differed; empty: none did, or none was repeated.
    """

    value: Value
    draws: bool
    stateful: str = ""


class _Draws(StageWrapper):
    def __init__(self, streams: RandomStreams) -> None:
        self._streams, self.any = streams, False

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        del layer
        before = self._streams.states()
        output = run(value, step, rows)
        self.any = self.any or not self._streams.drew_nothing(before)
        return output


class Owner:
    """Calls and runs of one worker.

    Args:
        stages: the worker's stages by number.
        streams: streams of random draws.
        least: minimum of the relative difference that counts as rounding.
    """

    def __init__(self, stages: Mapping[int, LocalStage], streams: RandomStreams, least: float = 0.0) -> None:
        self._stages, self._streams, self._least = stages, streams, least
        self._layers = {
            layer.index: (local_stage, layer.module)
            for local_stage in stages.values()
            for layer in local_stage.layers
        }
        self._training = True
        self.changes_buffers = False
        """Whether a run has changed a buffer, on which other micro-batches of its step depend."""
        self.step = 0
        self.rows = SampleRows(0, 0, 0, 0)
        self.sketches: dict[CallKey, CallSketch] | None = None
        """Sketches of the calls; None: they are not made."""

    @contextmanager
    def running(self, step: int, rows: SampleRows, *, training: bool) -> Iterator[None]:
        """Context of the runs of one witness; buffers are restored at its end.

        Args:
            step: number of the step.
            rows: samples of the unit.
            training: whether it is one of a step; otherwise of an evaluation.
        """
        self.step, self.rows, self._training = step, rows, training
        copies = list(self._stages.values())
        with ExitStack() as stack:
            stack.enter_context(self._copied_buffers())
            stack.enter_context(restored_attributes(self._all_modules()))
            for local_stage in copies if not training else ():
                stack.enter_context(local_stage.evaluating())
            stack.enter_context(copies[0].precision.step())
            stack.enter_context(torch.set_grad_enabled(training))
            yield

    @contextmanager
    def _copied_buffers(self) -> Iterator[None]:
        buffers: list[tuple[dict[str, Tensor | None], str, Tensor]] = [
            (buffers_of(module), name, buffer)
            for local_stage in self._stages.values()
            for layer in local_stage.with_weights
            for module in layer.module.modules()
            for name, buffer in buffers_of(module).items()
            if buffer is not None
        ]
        norms = {id(buffers_of(m)[n]) for c in self._stages.values() for m, n in c.buffers.norms}
        copies = {id(buffer): buffer.detach().clone() for _, _, buffer in buffers}
        for table, name, buffer in buffers:
            table[name] = copies[id(buffer)]
        try:
            yield
        finally:
            # Running statistics are read in evaluation only, which changes nothing.
            self.changes_buffers = self.changes_buffers or any(
                table[name] is not copies[id(buffer)] or not torch.equal(copies[id(buffer)], buffer)
                for table, name, buffer in buffers
                if id(buffer) not in norms
            )
            for table, name, buffer in buffers:
                table[name] = buffer

    def _all_modules(self) -> list[nn.Module]:
        layers = (layer for local_stage in self._stages.values() for layer in local_stage.with_weights)
        return [module for layer in layers for module in layer.module.modules()]

    def owns(self, layer: int) -> bool:
        """Return whether a layer is on this worker."""
        return layer in self._layers

    def tensors(self, captured: Mapping[int, CapturedLayer]) -> dict[str, Tensor]:
        """Parameters and buffers that the layers' steps use directly, as the layers see them."""
        tensors: dict[str, Tensor] = {}
        for index in captured.keys() & self._layers.keys():
            local_stage, module = self._layers[index]
            assert isinstance(module, CapturedLayer)
            with local_stage.precision.computing():
                tensors |= module.tensors
        return tensors

    def answer(self, request: ModuleCall | StageRun) -> Any:
        """Run what another worker asks for."""
        return self.call(request) if isinstance(request, ModuleCall) else self.run(request)

    def call(self, request: ModuleCall) -> ModuleResult:
        """Call a module of a captured layer."""
        local_stage, captured = self._layers[request.key.layer]
        assert isinstance(captured, CapturedLayer)
        with local_stage.precision.computing():
            return self.draw(request, captured.module_at(request.key.path))

    def draw(self, request: ModuleCall, module: Callable[..., Any]) -> ModuleResult:
        """Call a module within the random stream of its layer."""
        tensors = [x for x in pytree.tree_leaves((request.args, request.kwargs)) if isinstance(x, Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        entries = ContainerEntries(list(containers_in((request.args, request.kwargs))))
        inputs: tuple[Sketch, ...] = () if self.sketches is None else sketches_of(tensors)
        with self.stream(request.key.layer, request.states) as states, added_losses() as terms:
            output = module(*request.args, **request.kwargs)
        if self.sketches is not None:
            self.sketches[request.key] = CallSketch(inputs, sketches_of(output))
        changes = {
            number: tensor
            for number, (tensor, version) in enumerate(zip(tensors, versions, strict=True))
            if version_of(tensor) != version
        }
        return ModuleResult(output, dict(terms), states, changes, entries.changed())

    def stream(self, layer: int, states: Sequence[Tensor] | None) -> AbstractContextManager[list[Tensor]]:
        """Context of a function's call within the random stream of a layer; see ``continued``."""
        return self._streams.continued(layer, self.step, self.rows, states)

    def draws(self, layer: int, states: Sequence[Tensor]) -> bool:
        """Return whether a layer drew random numbers before it left these states."""
        with self.stream(layer, None) as first:
            pass
        return not all(map(torch.equal, first, states))

    def run(self, request: StageRun) -> StageResult:
        """Run the layers of a stage on whole samples, without recomputation, slices or a compiler."""
        local_stage, value = self._stages[request.stage], request.value
        if local_stage.skips is None and type(value) is Carried:
            value = value.value
        with self._sketching(local_stage):
            if not self._training:
                return StageResult(local_stage.output(value, self.step, self.rows), draws=False)
            draws, repeats = _Draws(self._streams), Repeats(self._streams.device, self._least)
            with local_stage.uncompiled([draws, repeats][: 1 + request.repeats]):
                output = local_stage.output(value, self.step, self.rows)
            return StageResult(output, draws.any, repeats.layer)

    @contextmanager
    def _sketching(self, local_stage: LocalStage) -> Iterator[None]:
        sketches = self.sketches
        with ExitStack() as stack:
            for layer in local_stage.layers if sketches is not None else ():
                if isinstance(layer.module, CapturedLayer):
                    paths = dict.fromkeys(s.module for s in layer.module.steps if s.module is not None)
                    for path in paths:
                        sketched = partial(_sketched, path, layer.index, sketches)  # type: ignore[arg-type]
                        stack.enter_context(intercepted(layer.module.module_at(path), sketched))
            yield


def _sketched(
    path: str,
    layer: int,
    sketches: dict[CallKey, CallSketch],
    plain: Callable[..., Any],
    /,
    *args: Any,
    **named: Any,
) -> Any:
    inputs = sketches_of((args, named))
    output = plain(*args, **named)
    number = sum(key.path == path and key.layer == layer for key in sketches)
    sketches[CallKey(path, layer, number)] = CallSketch(inputs, sketches_of(output))
    return output
