"""Wrapper of layers and loss functions that are given shares of sequences.

A loss function may ask for whole targets (``cf.whole_target``, ``cf.next_target``). In its first run in
training a layer without a ``Carry`` runs on two halves of its share as well: it has to compute the same of
each position, else it looks across the sequence and would see a share alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.aux_loss import collecting
from counterflow.api.contexts import CONTEXT, Context
from counterflow.common.trees import tensors_in
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.comparison import distance
from counterflow.verification.diagnosis.tolerances import ACTIVATIONS, COARSE

from ..messages.values import Value
from .carrying import carries_in
from .named_layer import LOSS, NamedLayer, place_of
from .precision import Precision
from .randomness import RandomStreams
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper

_LOG = logging.getLogger(__name__)


class SharedStage(Protocol):
    """A stage as the guard runs it; ``LocalStage`` documents the members."""

    stage: int
    layers: tuple[NamedLayer, ...]
    streams: RandomStreams
    precision: Precision

    @property
    def has_skips(self) -> bool:
        """True if values go around its layers."""

    def probing(self) -> AbstractContextManager[None]:
        """Return a context in evaluation mode, without effect on buffers."""

    def layer_runs(self) -> list[tuple[NamedLayer, Run, Sequence[int]]]:
        """Return each layer and its run without the stage's wrappers."""


class ContextGuard(StageWrapper):
    """Wrapper of a stage whose sequences are shared.

    Args:
        context: positions that share them.
        stage: the stage.
    """

    break_reason = "it is given a share of each sequence"

    def __init__(self, context: Context, stage: SharedStage) -> None:
        self._context, self._stage = context, stage
        self._compared_inputs = False
        self._checked = {LOSS, *(layer.index for layer in stage.layers if carries_in(layer.module))}

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        token = CONTEXT.set(self._context)
        try:
            if layer.index == 0 and not self._compared_inputs:
                self._compared_inputs = True
                self._refuse_whole_sequences(value)
            if layer.index not in self._checked and not self._stage.has_skips:
                self._checked.add(layer.index)
                self._check(layer, value, step, rows)
            return run(value, step, rows)
        finally:
            CONTEXT.reset(token)

    def _refuse_whole_sequences(self, value: Value) -> None:
        """Refuse inputs that are the same at all positions, as whole sequences would be.

        Raises:
            ConfigError: they are.
        """
        sums = [_fingerprint(tensor) for tensor in tensors_in(value) if tensor.numel() > 1]
        varied = [tensor for tensor in tensors_in(value) if tensor.numel() > 1 and _varies(tensor)]
        device = self._stage.streams.device
        row = torch.tensor([float(bool(varied)), *sums], dtype=torch.float64, device=device)
        rows = [torch.empty_like(row) for _ in range(self._context.share.count)]
        dist.all_gather(rows, row, group=self._context.group)
        if all(gathered[0] and gathered.equal(rows[0]) for gathered in rows):
            raise ConfigError(
                "all positions that share sequences are given the same inputs, so each would count its copy "
                "as a share of a longer sequence; give cf.share_sequence(tensor, pipeline.context) of inputs "
                "and targets"
            )

    def _check(self, layer: NamedLayer, value: Value, step: int, rows: SampleRows) -> None:
        """Compare a layer's output of a share with those of its halves.

        Raises:
            ConfigError: they differ.
        """
        stage = self._stage
        length = _length(value)
        run = next(run for other, run, _ in stage.layer_runs() if other is layer)
        with stage.probing(), torch.no_grad(), collecting():
            output = run(value, step, rows)
            try:
                halves = [run(half, step, rows) for half in _halves(value, length)]
            except Exception as error:  # it may need more positions than a half has
                _LOG.warning("%s was not checked on shares of sequences: %s", place_of(layer), error)
                return
        device = stage.streams.device.type
        lower = not stage.precision.plain or torch.is_autocast_enabled(device)
        for part, expected in zip(halves, _halves(output, length), strict=True):
            for actual, wanted in zip(tensors_in(part), tensors_in(expected), strict=True):
                if actual.shape != wanted.shape or _differ(actual, wanted, lower=lower):
                    raise ConfigError(
                        f"{place_of(layer)} of stage {stage.stage} computes something else of a share of a "
                        "sequence than of its halves, so it looks across the sequence; let its attention be "
                        "cf.attend with a cf.Carry, or train without cf.ContextParallel"
                    )


def _fingerprint(tensor: Tensor) -> float:
    flat = tensor.detach().reshape(-1).double()
    return float((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())


def _varies(tensor: Tensor) -> bool:
    return bool((tensor != tensor.reshape(-1)[0]).any())


def _differ(tensor: Tensor, expected: Tensor, *, lower: bool) -> bool:
    if not tensor.is_floating_point():
        return not tensor.equal(expected)
    tolerance = COARSE if lower else ACTIVATIONS.of(tensor.dtype)
    return bool(tensor.numel()) and not distance(expected, tensor) <= tolerance


def _length(value: Any) -> int:
    """Positions of a share: the second dimension of the value's first tensor that has one."""
    return next((tensor.shape[1] for tensor in tensors_in(value) if tensor.dim() > 1), 0)


def _halves(value: Any, length: int) -> list[Any]:
    """A value on the first and on the second half of a share."""
    half = length // 2

    def part(leaf: Any, first: int, count: int) -> Any:
        has = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
        return leaf.narrow(1, first, count) if has else leaf

    bounds = (0, half), (half, length - half)
    return [pytree.tree_map(lambda leaf: part(leaf, *bound), value) for bound in bounds]  # noqa: B023
