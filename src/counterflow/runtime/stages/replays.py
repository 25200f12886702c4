"""Layers of which only the input is saved: they are computed again when a backward uses what they saved.

This is ``recompute="layer"``; whole stages are computed again by an op of their own (``recomputed_pass.py``).

Invariant: a layer runs again in the same precision, with the input, random numbers and buffers of its first
run, and changes nothing else.
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

from counterflow.api.torch_internals import never_compiled
from counterflow.common.trees import mapped, tensors_in, versions
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.reruns import FirstOutput, RerunDiagnosis

from ..messages.values import Value
from .buffers import Buffers
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
        entry = self.replay.tensors.get(self.number)
        return None if entry is None else entry[0]


class Replay:
    """Second run of a layer, which computes the tensors that autograd saved when a backward first uses one.

    Args:
        place: the layer in words.
        rerun: runs the layer again, and returns its output.
        recount: called before that: ends the count of the previous replay's tensors, and returns the function
            that counts those of this one; None: nothing is counted.
    """

    def __init__(
        self, place: str, rerun: Callable[[Any], Any], recount: Callable[[], CountSaved | None]
    ) -> None:
        self.place = place
        self._rerun = rerun
        self._recount = recount
        self._value: Any = None
        self._versions: list[int] = []
        self._changes = False
        self._count_input: Callable[[], None] | None = None
        self._shapes: list[torch.Size] = []
        self.tensors: dict[int, tuple[Tensor, int]] = {}
        """Saved tensors that no backward has used yet, with their versions."""
        self.needed_twice: set[int] = set()
        """Numbers of the tensors that stay after a backward has used them."""
        self._ran = self._runs = False
        self.first: FirstOutput | None = None
        """Output that is compared with that of the second run."""

    def save(self, value: Any, *, changes: bool, count_input: Callable[[], None] | None = None) -> None:
        """Save the input to run on.

        Args:
            value: the input; a copy, if a run may change it.
            changes: whether a run may change it in place.
            count_input: counts the input as saved; called if autograd would have saved anything.
        """
        self._value, self._changes, self._versions = value, changes, versions(value)
        self._count_input = count_input

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context of the first run.

        Raises:
            ConfigError: it makes gradients of its own, which would compute it again before it has ended.
        """
        self._runs = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):  # torch.func's word for it
                raise self._refused() from error
            raise
        finally:
            self._runs = False

    def _refused(self) -> ConfigError:
        return ConfigError(
            f"{self.place} makes gradients in its forward (torch.autograd.grad or torch.func), so that it "
            "cannot be computed again by itself; take recompute='stage', or none"
        )

    def settle(self) -> None:
        """Drop tensors that no further backward uses, if the second run was made: there is no third one."""
        if self._ran:
            self.tensors = {
                number: item for number, item in self.tensors.items() if number in self.needed_twice
            }
            self._value = None

    @never_compiled
    def _pack(self, tensor: Tensor) -> Packed:
        if self._count_input is not None:
            self._count_input()
            self._count_input = None
        self._shapes.append(tensor.shape)
        return Packed(self, len(self._shapes) - 1)

    def _unpack(self, packed: Packed) -> Tensor:
        if self._runs:
            raise self._refused()
        number = packed.number
        if number not in self.tensors:
            self._run()
        tensor, version = self.tensors[number] if number in self.needed_twice else self.tensors.pop(number)
        if tensor._version != version:  # noqa: SLF001
            raise ConfigError(
                f"{self.place} changes a tensor in place that its own backward needs; leave out "
                "inplace=True there, or take recompute='stage', or none"
            )
        return tensor

    def _run(self) -> None:
        if versions(self._value) != self._versions:
            raise ConfigError(
                f"the input of {self.place} was changed in place before it was computed again, which did not "
                "happen in the first forward; copy it before it is changed"
            )
        count = self._recount()
        saved_tensors: list[tuple[Tensor, int]] = []

        @never_compiled
        def pack(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            saved_tensors.append((detached, detached._version))  # noqa: SLF001
            if count is not None:
                count(detached)
            return detached

        with torch.enable_grad():
            value = mapped(self._fresh_input, self._value)
            with torch.autograd.graph.saved_tensors_hooks(pack, _same):
                output = self._rerun(value)
        shapes = [tensor.shape for tensor, _ in saved_tensors]
        if shapes != self._shapes:
            raise ConfigError(
                f"{self.place} saved {len(self._shapes)} tensors for its backward and {len(shapes)} of other "
                "shapes when it was computed again; what it does may depend on its input, weights, buffers "
                "and torch's random numbers only"
            )
        if self.first is not None:
            self.first.compare(list(tensors_in(output)), self.place)
            self.first = None
        self.tensors = dict(enumerate(saved_tensors))
        self._ran = True

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
