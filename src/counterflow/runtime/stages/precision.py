"""Precision in which a stage's layers run: that of their weights, autocast, or weights cast before.

Invariant: a weight is cast once for each of its versions, not for each micro-batch. The graphs of all
micro-batches in flight share what it was cast to, and add their gradients in the weight's own precision. A
changed weight is cast anew before anything computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from counterflow.api.skip import Carried
from counterflow.capture.layer import CapturedLayer
from counterflow.common.tensors.devices import autocast_type
from counterflow.common.tensors.dtypes import dtype_of
from counterflow.common.tensors.torch_private import keeps_statistics, parameters_of, set_version_counters
from counterflow.common.trees import mapped
from counterflow.errors import ConfigError
from counterflow.execution import Execution

from ..messages.values import Value
from .named_layer import NamedLayer
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper
from .versions import Versions

_NOTHING = nullcontext()


class CastStage(Protocol):
    """The part of a stage whose precision is another than its weights'."""

    stage: int
    last: bool
    layers: tuple[NamedLayer, ...]
    versions: Versions | None

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters, each once."""


class Precision(StageWrapper):
    """Computation in the precision of the weights."""

    plain = True
    """True if layers run without a wrapper."""

    @property
    def masters(self) -> list[nn.Parameter]:
        """Parameters that are replaced while the layers run."""
        return []

    def computing(self) -> AbstractContextManager[Any]:
        """Context of runs of layers, first runs and recomputations."""
        return _NOTHING

    def backward(self) -> AbstractContextManager[Any]:
        """Context of a backward, in which a user's checkpoint may run a layer again."""
        return _NOTHING

    def step(self) -> AbstractContextManager[Any]:
        """Context of a list of actions: casts are cached until its end."""
        return _NOTHING

    def cast_input(self, value: Value) -> Value:
        """Return the model's input as the first stage computes with it."""
        return value

    def cast_output(self, value: Value) -> Value:
        """Return the model's output as the loss receives it."""
        return value

    def enter(self, value: Value) -> Value:
        """Return a stage's input as its layers compute with it."""
        return value

    def leave(self, value: Value) -> Value:
        """Return the output of a stage's layers as it is passed on."""
        return value

    def masters_of_casts(self) -> dict[int, nn.Parameter]:
        """Return the parameters for which casts stand now, by the identity of these."""
        return {}

    def forget(self) -> None:
        """Drop casts: the weights may have changed."""

    def updated(self, version: int, frees: Sequence[int]) -> None:
        """Drop the casts of freed versions: a version of the weights was made."""


class Autocast(Precision):
    """Torch's autocast, whose cache of cast weights lives as long as these stay as they are.

    Torch drops the cache when the outermost context is left: one stands around a whole list. It holds casts
    of leaves, which a stage's input is as well: layers get a view of it. All threads of a process share one
    cache: workers that are threads drop each other's casts too, and make them anew.

    Args:
        device: where layers run.
        dtype: the lower precision.
        parameters: the stage's.
        keeps: whether casts may be kept: not those of weights that are gathered for an op and go after it.
    """

    plain = False

    def __init__(
        self, device: torch.device, dtype: torch.dtype, parameters: Sequence[nn.Parameter], *, keeps: bool
    ) -> None:
        self._kind = autocast_type(device)
        self._dtype = dtype
        self._parameters = tuple(parameters)
        self._keeps = keeps
        self._seen: list[tuple[int, int]] = []

    @contextmanager
    @override
    def computing(self) -> Iterator[None]:
        """Unlike ``torch.autocast`` it never drops the cache, in no thread."""
        if self._keeps:
            now = [(p.data_ptr(), p._version) for p in self._parameters]  # noqa: SLF001 - documented as it
            if now != self._seen:
                self._seen = now
                torch.clear_autocast_cache()
        kind = self._kind
        before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, self._dtype)
        torch.set_autocast_cache_enabled(True)
        try:
            yield
        finally:
            torch.set_autocast_enabled(kind, before[0])
            torch.set_autocast_dtype(kind, before[1])
            torch.set_autocast_cache_enabled(cached)
            if not self._keeps:
                torch.clear_autocast_cache()

    @override
    def step(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._kind, enabled=False)

    @override
    def forget(self) -> None:
        torch.clear_autocast_cache()

    @override
    def updated(self, version: int, frees: Sequence[int]) -> None:
        """An update may hide from the tensors' versions that it changed them."""
        del version, frees
        torch.clear_autocast_cache()

    @override
    def breaks_block(self, _: NamedLayer) -> None:
        """Return None: no leaf is passed on inside a block."""

    @override
    def wrap_layer(self, _: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        return run(mapped(_no_leaf, value) if torch.is_grad_enabled() else value, step, rows)


class Cast(Precision):
    """The layers' weights cast to a lower precision, in place of the parameters while the layers run.

    The parameters are the masters: gradients are added, updated and saved in their precision. The model's
    input is cast as well, and its output is cast back for the loss. Buffers stay as they are, and so do
    weights of norms with running statistics, which torch computes in the statistics' precision (FSDP's
    ``MixedPrecision`` leaves them out for the same reason).

    Args:
        copy: the stage.
        dtype: the lower precision.
        stays: True if a weight is cast into the same memory each time, as graphs of the device need it; not
            where the schedule has several versions of it, which has no such graphs.

    Raises:
        ConfigError: a layer keeps its weights where they cannot be replaced.
    """

    plain = False

    def __init__(self, copy: CastStage, dtype: torch.dtype, *, stays: bool = False) -> None:
        self._dtype = dtype
        self._memory: dict[int, Tensor] | None = {} if stays else None
        """Memory of casts, by the parameter's identity; None: each cast has new memory."""
        self._copy = copy
        self._casts: dict[int, dict[int, Tensor]] = {}
        """Cast parameters by version and the parameter's identity."""
        self._counts: dict[int, int] = {}
        """The ``_version`` of all casts of a version; a layer may keep by it what it makes of one."""
        self._last_count = 0
        self._shown = False
        modules = {id(child): child for x in copy.layers for child in x.module.modules()}.values()
        for child in modules:
            if isinstance(child, nn.RNNBase):
                raise ConfigError(
                    f"compute_dtype replaces weights while layers run, and {type(child).__name__} keeps its "
                    "own list of them; take autocast"
                )
            if isinstance(child, CapturedLayer) and not child.follows_dtype:
                raise ConfigError(
                    "compute_dtype casts weights, and the model's forward makes numbers of their dtype (of "
                    "torch.finfo, say), which automatic layers have of the weights themselves; take "
                    "autocast, or convert the model before its layers are found"
                )
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (parameters_of(child), name, parameter)
            for child in modules
            if not keeps_statistics(child)
            for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.is_floating_point() and parameter.dtype != dtype
        ]

    @contextmanager
    @override
    def computing(self) -> Iterator[None]:
        if self._shown:
            yield
            return
        versions = self._copy.versions
        version = 0 if versions is None else versions.shown
        casts = self._casts.setdefault(version, {})
        if not casts:
            self._last_count = self._counts[version] = self._last_count + 1
        count = self._counts[version]
        self._shown = True
        try:
            for table, name, parameter in self._places:
                cast = casts.get(id(parameter))
                if cast is None:
                    cast = casts[id(parameter)] = self._cast(parameter)
                    set_version_counters((cast,), count)
                table[name] = cast
            yield
            self._refuse_changed(casts, count)
        finally:
            for table, name, parameter in self._places:
                table[name] = parameter
            self._shown = False

    def _cast(self, parameter: nn.Parameter) -> Tensor:
        with torch.enable_grad():
            cast = parameter.to(self._dtype)
        if self._memory is not None and self._copy.versions is None:
            memory = self._memory.setdefault(id(parameter), cast.detach())
            cast.data = memory.copy_(cast.detach())  # the graph to the parameter stays
        return cast

    def _refuse_changed(self, casts: Mapping[int, Tensor], count: int) -> None:
        for _, name, parameter in self._places:
            if casts[id(parameter)]._version != count:  # noqa: SLF001 - documented as it
                raise ConfigError(
                    f"a layer changes its weight {name!r} in training, and with compute_dtype what it "
                    "changes is a copy; let only the optimizer change it (in a hook after its step, say), or "
                    "take autocast"
                )

    @property
    @override
    def masters(self) -> list[nn.Parameter]:
        return [parameter for _, _, parameter in self._places]

    @override
    def backward(self) -> AbstractContextManager[Any]:
        return self.computing()

    @override
    def forget(self) -> None:
        self._casts.clear()

    @override
    def updated(self, version: int, frees: Sequence[int]) -> None:
        for gone in (*frees, version):
            self._casts.pop(gone, None)

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        return self.leave(run(self.enter(value), step, rows))

    @override
    def enter(self, value: Value) -> Value:
        return self.cast_input(value) if self._copy.stage == 0 else value

    @override
    def leave(self, value: Value) -> Value:
        return self.cast_output(value) if self._copy.last else value

    @override
    def masters_of_casts(self) -> dict[int, nn.Parameter]:
        return {id(table[name]): parameter for table, name, parameter in self._places}

    @override
    def cast_input(self, value: Value) -> Value:
        return _of_value(self._lower, value)

    @override
    def cast_output(self, value: Value) -> Value:
        return _of_value(self._raised, value)

    def _lower(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _raised(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is self._dtype else tensor


def _of_value(of: Callable[[Tensor], Tensor], value: Value) -> Value:
    return value._replace(value=mapped(of, value.value)) if type(value) is Carried else mapped(of, value)


def _no_leaf(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor


def precision_of(
    execution: Execution, device: torch.device, *, shards: bool
) -> Callable[[CastStage], Precision]:
    """Return the constructor of the precision in which a stage's layers run.

    Args:
        execution: options of the run.
        device: device of the layers.
        shards: True if ``parallelize`` shards their weights.

    Raises:
        ConfigError: ``compute_dtype`` and another option exclude each other.
    """
    autocast, compute_dtype = dtype_of(execution.autocast), dtype_of(execution.compute_dtype)
    if compute_dtype is None:
        if autocast is None:
            return lambda _: Precision()
        return lambda copy: Autocast(device, autocast, copy.parameters(), keeps=not shards)
    for conflict, name, instead in (
        (autocast, "autocast", "use only one of them"),
        (shards, "parallelize", "give fully_shard a MixedPrecisionPolicy"),
        (execution.compile, "compile", "take autocast"),
    ):
        if conflict:
            raise ConfigError(
                f"compute_dtype replaces weights while layers run; {name} does not go with it: {instead}"
            )
    return lambda copy: Cast(copy, compute_dtype, stays=execution.capture)
