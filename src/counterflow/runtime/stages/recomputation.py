"""Support of recomputation: guards of inputs, and replays of layers for the tensors that autograd saved.

Invariant: the second run has the input of the first one, and changes nothing else. Inputs that nothing
changes in place are not copied: torch counts such changes (``_version``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.api.torch_internals import never_compiled
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.torch_private import same_memory
from counterflow.common.trees import mapped, tensors_in, versions
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.reruns import FirstOutput

from ..messages.values import Value
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper

CountSaved = Callable[[Tensor], None]
"""Function that counts a tensor as saved for a backward."""


def same_tensors(value: Any) -> Any:
    """A copy of a value's trees with the same tensors, as a layer may remove entries from its input."""
    return mapped(_itself, value)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class InputGuard(StageWrapper):
    """Guard of an input that a stage or layer may change in place.

    The first run shows whether it does; if not, later runs do nothing for it.
    """

    changes: bool | None = None
    """True if the input is changed in place; None: unknown before the first run."""

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        if self.changes is False:
            return run(value, step, rows)
        value_in = self.as_input(value)
        same = same_tensors(value_in)
        before = versions(same)
        output = run(value_in, step, rows)
        self.learn(same, before)
        return output

    def as_input(self, value: Any) -> Any:
        """Return the value to run on: autograd lets nobody change a leaf that needs a gradient."""
        return value if self.changes is False else mapped(_no_leaf, value)

    def saved_copy(self, value: Any) -> Any:
        """Return the value to save for another run."""
        return value if self.changes is False else mapped(copied, value)

    def learn(self, value_in: Any, before: list[int]) -> None:
        """Note whether the first run changed its input."""
        if self.changes is None:
            self.changes = versions(value_in) != before


def copied(tensor: Tensor) -> Tensor:
    """A leaf of its own with the same content, and the same strides: kernels save what fits these."""
    plain = tensor.detach()
    same = plain.clone()
    if same.stride() != plain.stride() and plain.layout is torch.strided and not is_dtensor(plain):
        same = _with_strides(plain, same)
    return same.requires_grad_(tensor.requires_grad)


def _with_strides(tensor: Tensor, dense: Tensor) -> Tensor:
    """``dense`` in memory with the gaps of ``tensor``; ``dense`` itself if elements of that share memory."""
    distinct = tuple(
        slice(0, 1) if size > 1 and not stride else slice(None)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    part = tensor[distinct]  # without what an expand repeats
    gaps = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
    try:
        return gaps.copy_(part).expand(tensor.shape)
    except RuntimeError:
        return dense


def _no_leaf(tensor: Tensor) -> Tensor:
    """A tensor with the same memory and its own version counter: parts of a mini-batch share a counter."""
    if not tensor.is_leaf:
        return tensor
    return same_memory(tensor)


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
            return _no_leaf(copied(tensor))
        return tensor.detach().requires_grad_(tensor.requires_grad)


@never_compiled
def _same(tensor: Tensor) -> Tensor:
    return tensor
