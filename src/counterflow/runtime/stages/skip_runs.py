"""Runs a stage's layers with what they save for later layers and load from earlier ones.

Invariant: what is computed does not depend on the cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.carry import NOTHING, Carry
from counterflow.api.skip import Carried, Skip
from counterflow.common.trees import versions
from counterflow.errors import ConfigError

from ..messages.values import Value
from .carrying import carries_in, carrying
from .named_layer import NamedLayer, place_of
from .sample_rows import SampleRows
from .skip_links import LayerSkips, StageSkips, skips_in
from .stage_wrappers import Run, StageWrapper


class PassBy(StageWrapper):
    """Takes past a stage's layers what they neither load nor carry; it is around their recomputation.

    So a layer that is computed again holds no state that an earlier one left to the next slice.

    Args:
        plan: the stage's skips.
        layers: its layers as they are on this worker.
    """

    break_reason = "layers of its stage have skips, or states of slices"

    def __init__(self, plan: StageSkips, layers: Sequence[NamedLayer]) -> None:
        self._of_layer: dict[int, tuple[set[int], set[int], set[int]]] = {}
        needed = plan.handed_on
        for layer, layer_skips in reversed(list(zip(layers, plan.layers, strict=True))):
            self._of_layer[layer.index] = (
                {*layer_skips.loads, *layer_skips.carries},
                needed - {*layer_skips.carries},
                set(needed),
            )
            needed |= {*layer_skips.loads}

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """The output has all that later layers and stages, and the next slice need.

        Raises:
            ConfigError: the layer changes in place what others saved.
        """
        takes, passing, needed = self._of_layer[layer.index]
        value, skips = value
        before = versions(skips)
        output, saved = run(Carried(value, {n: v for n, v in skips.items() if n in takes}), step, rows)
        if versions(skips) != before:
            raise ConfigError(
                f"{place_of(layer)} changes in place what was saved in a skip before, or what another slice "
                "left in a cf.Carry; save a copy, or let the layer make a new tensor"
            )
        past = {n: v for n, v in skips.items() if n in passing}
        return Carried(output, past | {n: v for n, v in saved.items() if n in needed})


class SkipRunner(StageWrapper):
    """Runs a stage's layers with what they save and load.

    Args:
        plan: the stage's skips.
        layers: its layers as they are on this worker.
        by_layer: whether the layers are computed again one by one, so that graphs save nothing.
    """

    break_reason = "layers of its stage have skips, or states of slices"

    def __init__(self, plan: StageSkips, layers: Sequence[NamedLayer], *, by_layer: bool = False) -> None:
        self._gives, self._leaves = bool(plan.gives or plan.next), bool(plan.carries)
        self._by_layer = by_layer
        self._compact = _Compact()
        """Copies of the states that the stage's run at hand leaves, if it makes no graph."""
        self._of_layer: dict[int, tuple[LayerSkips, dict[int, Skip], list[Skip]]] = {}
        self._carries: dict[int, list[tuple[int, Carry]]] = {}
        for layer, layer_skips in zip(layers, plan.layers, strict=True):
            skips = skips_in(layer.module)
            numbered = {n: s for n, s in zip(layer_skips.inner, skips, strict=True) if n is not None}
            self._of_layer[layer.index] = layer_skips, numbered, skips
            its_carries = carries_in(layer.module) if layer_skips.carries else ()
            self._carries[layer.index] = list(zip(layer_skips.carries, its_carries, strict=True))

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        output = run(value if type(value) is Carried else Carried(value, {}), step, rows)
        self._compact.clear()
        return output if self._gives or (self._leaves and rows.slices > 1) else output.value

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """The layer is given what it loads, and its output has what it makes for others.

        Raises:
            ConfigError: it does not save what it has to.
        """
        layer_skips, numbered, skips = self._of_layer[layer.index]
        carries = self._carries[layer.index] if rows.slices > 1 else []
        value, values = value
        states = [values.get(number, NOTHING) for number, _ in carries]
        for skip in skips:
            skip._empty()  # noqa: SLF001 - what a plain run left
            skip._runs = True  # noqa: SLF001
        try:
            for number in layer_skips.loads:
                numbered[number]._put(values[number])  # noqa: SLF001
            with carrying(layer, [carry for _, carry in carries], states) as ends:
                output = run(value, step, rows)
            saved = {number: self._saved_value(layer.index, numbered[number]) for number in layer_skips.saves}
        finally:
            for skip in skips:
                skip._empty()  # noqa: SLF001
                skip._runs = False  # noqa: SLF001
        states_out = {number: state for (number, _), state in zip(carries, ends, strict=True)}
        if rows.slice == rows.slices - 1:
            states_out = {}  # nobody takes it
        if states_out and self._by_layer:
            states_out = _Compact().of(states_out)  # each layer is computed again with its own copies
        elif states_out and not torch.is_grad_enabled():
            states_out = self._compact.of(states_out)
        return Carried(output, saved | states_out)

    def _saved_value(self, index: int, skip: Skip) -> Any:
        if skip._value is NOTHING:  # noqa: SLF001
            raise ConfigError(f"layer {index} did not save the skip {skip.name!r} in its forward")
        skip._check()  # noqa: SLF001
        return skip._value  # noqa: SLF001


class _Compact:
    """Copies of states that hold no other memory, as keys and values may be views of one tensor with queries.

    Where a graph saves that tensor, nothing is gained, and states stay as they are.

    Invariant: what several layers leave has one copy, so that a run without a graph gives as many tensors as
    the one with a graph that follows it.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}
        """Weak reference to a view and its copy, by the view's ``id``; None: no copy is needed."""

    def of(self, states: dict[int, Any]) -> dict[int, Any]:
        """States without other memory."""
        sizes: dict[int, int] = {}
        views = {id(leaf): leaf for leaf in pytree.tree_leaves(states) if type(leaf) is Tensor}
        for view in views.values():
            pointer = view.untyped_storage().data_ptr()
            sizes[pointer] = sizes.get(pointer, 0) + view.nbytes
        for key, view in views.items():
            before = self._copies.get(key)
            if before is not None and before[0]() is view:
                continue
            storage = view.untyped_storage()
            copies = sizes[storage.data_ptr()] < storage.nbytes()
            copy = view.clone(memory_format=torch.contiguous_format) if copies else None
            self._copies[key] = weakref.ref(view), copy

        def compact(leaf: Any) -> Any:
            copy = self._copies[id(leaf)][1] if id(leaf) in views else None
            return leaf if copy is None else copy

        compact_states: dict[int, Any] = pytree.tree_map(compact, states)
        return compact_states

    def clear(self) -> None:
        """Hold nothing any more."""
        self._copies.clear()
