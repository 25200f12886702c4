"""Layers of which only the input is saved: they are computed again when a backward uses what they saved.

Invariant: a layer runs again in the same precision, with the random numbers and buffers of its first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.common.trees import tensors_in, versions
from counterflow.verification.diagnosis.reruns import RerunDiagnosis

from ..messages.values import Value
from .buffers import Buffers
from .named_layer import NamedLayer, place_of
from .recomputation import CountSaved, InputGuard, Replay, same_tensors
from .sample_rows import SampleRows
from .saved_bytes import SavedBytes, SavedStorage
from .stage_wrappers import Run, StageWrapper


class LayerReplays(StageWrapper):
    """Replays of one stage's layers.

    Args:
        layers: layers of the stage.
        device: device of the layers.
        computing: makes the context in which layers run.
        note: callback for each replay when its layer runs for the first time.
    """

    break_reason = "layers are computed again one by one"

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        device: torch.device,
        computing: Callable[[], AbstractContextManager[Any]],
        note: Callable[[Replay], None],
    ) -> None:
        self.count_saved: CountSaved | None = None
        """In a forward: counts the inputs that are saved."""
        self.recount: Callable[[], CountSaved] | None = None
        """In a backward: ends the count of the previous layer, and returns what counts the next one."""
        self._computing, self._note = computing, note
        self._of = {
            layer.index: (InputGuard(), Buffers([layer.module]), RerunDiagnosis(device)) for layer in layers
        }
        self._watched: list[tuple[InputGuard, Value, list[int], Replay]] = []

    @contextmanager
    def counted(self, meter: SavedBytes) -> Iterator[None]:
        """Context of a backward in which the tensors of a recomputed layer count until the next layer's.

        Args:
            meter: count of the bytes that are saved for backwards.
        """
        collected: list[SavedStorage] = []

        def recount() -> CountSaved:
            meter.release(collected)
            return partial(meter.count, collected=collected)

        self.recount = recount
        try:
            yield
        finally:
            self.recount = None
            meter.release(collected)

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        self._watched.clear()
        value = run(value, step, rows)
        for guard, layer_input, before, replay in self._watched:
            guard.learn(layer_input, before)
            if not guard.changes:
                replay.save(layer_input, changes=False)
        self._watched.clear()
        return value

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        if not torch.is_grad_enabled():
            return run(value, step, rows)
        guard, buffers, reruns = self._of[layer.index]
        contents = buffers.snapshot()

        def rerun(value: Value) -> Value:
            with self._computing(), buffers.swapped_in(contents):
                return run(value, step, rows)

        replay = Replay(place_of(layer), rerun, lambda: None if self.recount is None else self.recount())
        self._note(replay)
        same = same_tensors(value)
        if guard.changes is None:
            self._watched.append((guard, same, versions(same), replay))
        count_input = None if self.count_saved is None else partial(_count_all, self.count_saved, same)
        replay.save(guard.saved_copy(same), changes=guard.changes is not False, count_input=count_input)
        with replay.watch():
            value = run(value, step, rows)
        replay.first = reruns.first_output(list(tensors_in(value)), step)
        return value


def _count_all(count: CountSaved, value: Value) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            count(leaf)
