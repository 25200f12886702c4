"""Layers of which only the input is saved: they are computed again when a backward uses what they saved.

This is ``recompute="layer"``; whole stages are computed again by an op of their own (``recomputed_pass.py``).

Invariant: a layer runs again in the same precision, with the input, random numbers and buffers of its first
run, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.torch_internals import never_compiled
from counterflow.common.tensors.torch_private import without_modes
from counterflow.common.trees import mapped, tensors_in, versions
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.reruns import FirstOutput, RerunDiagnosis

from ..messages.values import Value
from .buffers import Buffers, Contents
from .input_guard import InputGuard, copied, non_leaf, same_tensors
from .named_layer import NamedLayer, place_of
from .sample_rows import SampleRows
from .saved_bytes import SavedBytes, SavedStorage
from .stage_wrappers import Run, StageWrapper

CountSaved = Callable[[Tensor], None]
"""Function that counts a tensor as saved for a backward."""


class Packed:
    """Placeholder for the ``number``-th tensor that autograd saved in a run; a replay computes it again."""

    __slots__ = ("number", "replay")

    def __init__(self, replay: Replay, number: int) -> None:
        self.replay = replay
        self.number = number

    def mark_needed_twice(self) -> None:
        """Keep the tensor after a backward has used it, for another one."""
        self.replay.needed_twice.add(self.number)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, if a replay has computed it."""
        tensors = self.replay.tensors
        return tensors[self.number] if tensors else None


class ReplayedLayer:
    """A layer that is computed again, with what all its units have in common.

    Args:
        layer: the layer.
        device: device of the layer.
        computing: makes the context in which layers run.
    """

    __slots__ = ("_computing", "_layer_buffers", "guard", "layer", "reruns")

    def __init__(
        self, layer: NamedLayer, device: torch.device, computing: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.layer, self._computing = layer, computing
        self.guard, self.reruns = InputGuard(), RerunDiagnosis(device)
        buffers = Buffers([layer.module])
        self._layer_buffers = buffers if buffers.places or buffers.norms else None

    @property
    def place(self) -> str:
        """The layer in words."""
        return place_of(self.layer)

    def snapshot(self) -> Contents:
        """Return the contents of its buffers."""
        return () if self._layer_buffers is None else self._layer_buffers.snapshot()

    def surroundings(self, contents: Contents) -> AbstractContextManager[Any]:
        """Return the context of a further run: the precision and the buffers of the first one.

        Args:
            contents: contents of its buffers.
        """
        if self._layer_buffers is None:
            return self._computing()
        context = ExitStack()
        context.enter_context(self._computing())
        context.enter_context(self._layer_buffers.swapped_in(contents))
        return context


class Replay:
    """Second run of a layer, which computes the tensors that autograd saved when a backward first uses one.

    Hooks of saved tensors run for each of them in both runs, so they call as little as they can.

    Args:
        layer: the layer.
        run: runs the layer on a value, without its precision and buffers.
        recount: called before a second run: ends the count of the previous replay's tensors, and returns the
            function that counts those of this one; None: nothing is counted.

    Attributes:
        tensors: saved tensors by number; None: a backward has used it. Empty before the second run.
        needed_twice: numbers of the tensors that stay after a backward has used them.
        first: output that is compared with that of the second run.
    """

    __slots__ = (
        "_changes",
        "_contents",
        "_count",
        "_count_input",
        "_layer",
        "_recount",
        "_run",
        "_runs",
        "_shapes",
        "_value",
        "_versions",
        "_versions_saved",
        "first",
        "needed_twice",
        "tensors",
    )

    def __init__(
        self, layer: ReplayedLayer, run: Callable[[Value], Value], recount: Callable[[], CountSaved | None]
    ) -> None:
        self._layer, self._run, self._recount = layer, run, recount
        self._contents = layer.snapshot()
        self._value: Any = None
        self._versions: list[int] = []
        self._changes = self._runs = False
        self._count_input: Callable[[], None] | None = None
        self._count: CountSaved | None = None
        self._shapes: list[torch.Size] = []
        self._versions_saved: list[int] = []
        self.tensors: list[Tensor | None] = []
        self.needed_twice: set[int] = set()
        self.first: FirstOutput | None = None

    def save(self, value: Any, *, changes: bool, count_input: Callable[[], None] | None = None) -> None:
        """Save the input to run on.

        Args:
            value: the input; a copy, if a run may change it.
            changes: whether a run may change it in place.
            count_input: counts the input as saved; called if autograd would have saved anything.
        """
        self._value, self._changes, self._versions = value, changes, versions(value)
        self._count_input = count_input

    def run_first(self, value: Value) -> Value:
        """Run the layer the first time.

        Raises:
            ConfigError: it makes gradients of its own, which would compute it again before it has ended.
        """
        self._runs = True
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                return self._run(value)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):  # torch.func's word for it
                raise self._refused() from error
            raise
        finally:
            self._runs = False

    def _refused(self) -> ConfigError:
        return ConfigError(
            f"{self._layer.place} makes gradients in its forward (torch.autograd.grad or torch.func), so "
            "that it cannot be computed again by itself; take recompute='stage', or none"
        )

    def settle(self) -> None:
        """Drop tensors that no further backward uses, if the second run was made: there is no third one."""
        if self.tensors:
            twice = self.needed_twice
            self.tensors = [tensor if n in twice else None for n, tensor in enumerate(self.tensors)]
            self._value = None

    @never_compiled
    def _pack(self, tensor: Tensor) -> Packed:
        if self._count_input is not None:
            self._count_input()
            self._count_input = None
        shapes = self._shapes
        shapes.append(tensor.shape)
        return Packed(self, len(shapes) - 1)

    def _unpack(self, packed: Packed) -> Tensor:
        if self._runs:
            raise self._refused()
        number = packed.number
        tensor = self.tensors[number] if self.tensors else None
        if tensor is None:
            self._run_again()
            tensor = self.tensors[number]
            assert tensor is not None
        if number not in self.needed_twice:
            self.tensors[number] = None
        if tensor._version != self._versions_saved[number]:  # noqa: SLF001
            raise ConfigError(
                f"{self._layer.place} changes a tensor in place that its own backward needs; leave out "
                "inplace=True there, or take recompute='stage', or none"
            )
        return tensor

    @never_compiled
    def _pack_again(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        self.tensors.append(tensor)
        self._versions_saved.append(tensor._version)  # noqa: SLF001
        if self._count is not None:
            self._count(tensor)
        return tensor

    def _run_again(self) -> None:
        if versions(self._value) != self._versions:
            raise ConfigError(
                f"the input of {self._layer.place} was changed in place before it was computed again, which "
                "did not happen in the first forward; copy it before it is changed"
            )
        self._count = self._recount()
        self.tensors, self._versions_saved = [], []
        with torch.enable_grad():
            value = mapped(self._fresh_input, self._value)
            with saved_tensors_hooks(self._pack_again, _same), self._layer.surroundings(self._contents):
                output = self._run(value)
        self._count = None
        shapes = [tensor.shape for tensor in self.tensors]  # type: ignore[union-attr]
        if shapes != self._shapes:
            raise ConfigError(
                f"{self._layer.place} saved {len(self._shapes)} tensors for its backward and {len(shapes)} "
                "of other shapes when it was computed again; what it does may depend on its input, weights, "
                "buffers and torch's random numbers only"
            )
        if self.first is not None:
            with without_modes():  # modes see what layers do
                self.first.compare(list(tensors_in(output)), self._layer.place)
            self.first = None

    def _fresh_input(self, tensor: Tensor) -> Tensor:
        if self._changes:
            return non_leaf(copied(tensor))
        return tensor.detach().requires_grad_(tensor.requires_grad)


@never_compiled
def _same(tensor: Tensor) -> Tensor:
    return tensor


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
        self._note = note
        self._layers = {layer.index: ReplayedLayer(layer, device, computing) for layer in layers}
        self._watched: list[tuple[InputGuard, Value, list[int], Replay]] = []

    def changing(self) -> frozenset[int]:
        """Return the numbers of the layers that may change their input in place."""
        layers = self._layers.items()
        return frozenset(index for index, replayed in layers if replayed.guard.changes is not False)

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
        replayed_layer = self._layers[layer.index]
        guard = replayed_layer.guard
        replay = Replay(replayed_layer, lambda value: run(value, step, rows), self._recounted)
        self._note(replay)
        same = same_tensors(value)
        if guard.changes is None:
            self._watched.append((guard, same, versions(same), replay))
        count_input = None if self.count_saved is None else partial(_count_all, self.count_saved, same)
        replay.save(guard.saved_copy(same), changes=guard.changes is not False, count_input=count_input)
        value = replay.run_first(value)
        replay.first = replayed_layer.reruns.first_output(tensors_in(value), step)
        return value

    def _recounted(self) -> CountSaved | None:
        return None if self.recount is None else self.recount()


def _count_all(count: CountSaved, value: Value) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            count(leaf)
