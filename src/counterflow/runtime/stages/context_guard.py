"""Wrapper of layers and loss functions that are given shares of sequences.

A loss function may ask for whole targets (``cf.whole_target``, ``cf.next_target``). In its first run in
training a layer without a ``Carry`` is diagnosed on two halves of its share
(``verification/diagnosis/shared_layers.py``). In slices the diagnosis of these finds what looks across them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from counterflow.api.aux_loss import collecting
from counterflow.api.contexts import CONTEXT, Context
from counterflow.common.trees import tensors_in
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.shared_layers import SharedLayer, diagnose_shared_layer

from ..messages.values import Value
from .carrying import carries_in
from .named_layer import LOSS, NamedLayer, place_of
from .precision import Precision
from .randomness import RandomStreams
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper


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
                self._compared_inputs = self._refuse_whole_sequences(value)
            if layer.index not in self._checked and not self._stage.has_skips:
                self._checked.add(layer.index)
                self._check(layer, value, step, rows)
            return run(value, step, rows)
        finally:
            CONTEXT.reset(token)

    def _refuse_whole_sequences(self, value: Value) -> bool:
        """Refuse inputs that are the same at all positions, as whole sequences would be.

        Returns:
            False: they show nothing, since all elements are equal, as those of a slice of padding.

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
        return any(bool(gathered[0]) for gathered in rows)

    def _check(self, layer: NamedLayer, value: Value, step: int, rows: SampleRows) -> None:
        stage = self._stage
        run = next(run for other, run, _ in stage.layer_runs() if other is layer)
        lower = not stage.precision.plain or torch.is_autocast_enabled(stage.streams.device.type)

        def run_part(part: Value) -> tuple[Value, dict[str, Tensor]]:
            with collecting() as collected:
                output = run(part, step, rows)
            return output, dict(collected.terms)

        shared = SharedLayer(place_of(layer), stage.stage, run_part, lower)
        with stage.probing(), torch.no_grad():
            diagnose_shared_layer(shared, value, rows.stop - rows.start)


def _fingerprint(tensor: Tensor) -> float:
    flat = tensor.detach().reshape(-1).double()
    return float((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())


def _varies(tensor: Tensor) -> bool:
    return bool((tensor != tensor.reshape(-1)[0]).any())
