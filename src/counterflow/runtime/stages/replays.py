"""Layers of which the input alone is kept: they are computed again when a backward asks for what they saved.

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

from ..messages.values import Value
from .named_layer import NamedLayer, place_of
from .recomputation import Buffers, FirstRuns, Hold, InputGuard, Replay, same_tensors
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
        self.hold: Hold | None = None
        """In a forward: notes what is kept to compute layers again."""
        self.recount: Callable[[], Hold] | None = None
        """In a backward: forgets what the layer recomputed last kept, and gives what notes the next one's."""
        self._computing, self._note = computing, note
        self._of = {
            layer.index: (InputGuard(), Buffers([layer.module]), FirstRuns(device)) for layer in layers
        }
        self._watched: list[tuple[InputGuard, Value, list[int], Replay]] = []

    @contextmanager
    def counted(self, meter: SavedBytes) -> Iterator[None]:
        """Context of a backward in which the tensors of a recomputed layer count until the next layer's.

        Args:
            meter: count of the bytes that are saved for backwards.
        """
        collected: list[SavedStorage] = []

        def recount() -> Hold:
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
                replay.keep(layer_input, changes=False)
        self._watched.clear()
        return value

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        if not torch.is_grad_enabled():
            return run(value, step, rows)
        guard, buffers, first_runs = self._of[layer.index]
        contents = buffers.snapshot()

        def rerun(value: Value) -> Value:
            with self._computing(), buffers.swapped_in(contents):
                return run(value, step, rows)

        replay = Replay(place_of(layer), rerun, lambda: None if self.recount is None else self.recount())
        self._note(replay)
        same = same_tensors(value)
        if guard.changes is None:
            self._watched.append((guard, same, versions(same), replay))
        hold = None if self.hold is None else partial(_hold_all, self.hold, same)
        replay.keep(guard.saved_copy(same), changes=guard.changes is not False, hold=hold)
        with replay.watch():
            value = run(value, step, rows)
        replay.first = first_runs.of(list(tensors_in(value)), step)
        return value


def _hold_all(hold: Hold, value: Value) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            hold(leaf)
