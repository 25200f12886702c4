"""The record of a model that layers share: compared with the model before each step, and made anew.

Invariant: what layers run was recorded from the model as it is. If a value that the record depends on has
changed, the model is recorded again and cut at the same places; if that cannot be, an error names the value.
"""

from __future__ import annotations

import copy
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from operator import contains
from typing import Any, Self

from torch import Tensor, nn

from counterflow.common.tensors.fake_layers import silent_fake_tensors
from counterflow.errors import ConfigError

from .guards import HOOK, Environment, Guards, RecordDependencies, guards_of
from .layer import CapturedLayer
from .layer_contents import LayerSteps, held_names
from .layer_steps import parts_of
from .leaks import remove_leaks
from .opening import Records, record_again
from .python_state import Plain, Unknown
from .record import Record
from .recutting import Uncut, crossings_of, places_of
from .sizes import Varies, refuse_differences, sizes_of
from .tracing_internals import saved_without_hooks
from .untraceable import Unfollowed, clear_frames

_CAPTURING = threading.Lock()
"""Held during a capture, because torch's symbolic sizes support only one thread at a time."""

_VARIANTS = 8
"""Largest number of records of a model that are saved: flags may go back and forth."""

_LENGTHS = 4096
"""Largest number of lengths of sequences that are remembered."""

_Sizes = Mapping[int, int]


class RecordSlot(IntEnum):
    """Use of a record."""

    TRAINING = 0
    """Steps: each module in its own mode, with gradients."""
    EVALUATION = 1
    """Evaluations and predictions: all modules in evaluation mode, without gradients."""


class Variant:
    """A record of a model in one state.

    Args:
        reads: what it depends on.
        guards: values of that.
        parts: its steps by layer.
        record: the steps.
    """

    def __init__(
        self,
        reads: RecordDependencies,
        guards: Guards,
        parts: Sequence[LayerSteps],
        record: Record,
    ) -> None:
        self.reads, self.guards, self.parts = reads, guards, tuple(parts)
        self.crossings = crossings_of(record, parts)
        self.record = record
        self.lengths: set[tuple[int, ...]] = set()
        """Lengths of sequences for which the model was seen to do what the record says."""
        self.replaced: Mapping[str, Any] = {}
        """Modules without weights and buffers that the user has replaced, by name."""
        self.called: Mapping[str, nn.Module] = {}
        """Modules that the steps call, by path."""

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Tensors that are neither parameter nor buffer, by name."""
        return self.record.constants


@contextmanager
def capturing() -> Iterator[None]:
    """Let one thread record at a time, and leave no tensor without values behind."""
    with _CAPTURING, silent_fake_tensors(), saved_without_hooks():
        try:
            yield
        except ConfigError as error:
            clear_frames(error)
            raise
        finally:
            remove_leaks()


class Recording:
    """Records of one model, for training and for evaluation.

    Args:
        model: the user's model.
        records: its first records.
        parts: their steps, by layer.
        environment: settings of torch during the capture.
    """

    def __init__(
        self,
        model: nn.Module,
        records: Records,
        parts: tuple[Sequence[LayerSteps], Sequence[LayerSteps]],
        environment: Environment,
    ) -> None:
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._example, self._opened, self.mark = records.example, records.opened, records.mark
        self._grad = records.grad_in_evaluation
        self.closed = records.closed
        self.current = [
            Variant(reads, guards_of(model, reads, environment), mode_parts, record)
            for record, mode_parts in zip((records.training, records.evaluation), parts, strict=True)
            for reads in (self._reads(record, evaluates=record is records.evaluation),)
        ]
        if not model.training:
            self._assume_training()
        self._variants: tuple[list[Variant], list[Variant]] = ([self.current[0]], [self.current[1]])
        self._names = [
            {name for of_slot in parts for name in held_names(of_slot[number])}
            for number in range(len(parts[0]))
        ]
        self._called_paths = [
            {step.module for of_slot in parts for step in of_slot[number].steps}
            for number in range(len(parts[0]))
        ]
        paths = {step.module for mode_parts in parts for part in mode_parts for step in part.steps} - {None}
        self._called = {path: model.get_submodule(path) for path in paths if path is not None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself for a copy of layers; a copy if the model was copied with them."""
        model = self.model
        twin = None if model is None else memo.get(id(model))
        if twin is None:
            return self
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._model = weakref.ref(twin)
        copied._called = {path: twin.get_submodule(path) for path in self._called}
        copied.current = list(map(copy.copy, self.current))
        for slot in RecordSlot:
            variant = copied.current[slot]
            old, names = variant.guards, self.stale(slot, variant.guards.environment)
            variant.guards = guards_of(twin, variant.reads, old.environment)
            if names:
                variant.guards = variant.guards.with_values(old, names)
        copied._variants = ([copied.current[0]], [copied.current[1]])
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    @property
    def model(self) -> nn.Module | None:
        """The user's model; None: nobody has it any more."""
        return self._model()

    def settle(self) -> None:
        """Let the weights and buffers of the model, as they are now, be the recorded ones."""
        model = self.model
        for variant in self.current if model is not None else ():
            assert model is not None
            now = guards_of(model, variant.reads, variant.guards.environment)
            unknown = any(isinstance(watch, Unknown) for watch in variant.guards.state.watches)
            if not unknown and not variant.guards.differences(now):
                variant.guards = now
            else:
                variant.guards = variant.guards._replace(weights=now.weights)

    def stale(
        self, slot: RecordSlot, environment: Environment, *, ignores_weights: bool = False
    ) -> list[str]:
        """Names of the values that differ from the recorded ones; none: layers may run.

        Args:
            slot: use of the record.
            environment: settings of torch around the forwards.
            ignores_weights: whether modules may have other weights than at first.
        """
        variant, model = self.current[slot], self.model
        if model is None or variant.guards.unchanged(environment):
            return []
        now = guards_of(model, variant.reads, environment)
        names = variant.guards.differences(now)
        if ignores_weights:
            variant.guards = variant.guards._replace(weights=now.weights)
        names += [n for n, weight in variant.guards.weights.items() if now.weights.get(n) != weight]
        if not names:
            variant.guards = now
        return names

    def digest(self, slot: RecordSlot, environment: Environment, names: Sequence[str]) -> int:
        """A number of the values that differ, which is the same on workers that have set the same."""
        model = self.model
        if model is None:
            return 0
        tokens = guards_of(model, self.current[slot].reads, environment).state.tokens
        values = [
            (name, str(tokens.get(name)) if isinstance(tokens.get(name), Plain) else "") for name in names
        ]
        return zlib.crc32(repr(values).encode())

    def refresh(self, slot: RecordSlot, environment: Environment, names: Sequence[str]) -> None:
        """Record the model as it is now, unless it was recorded so before.

        Args:
            slot: use of the record.
            environment: settings of torch around the forwards.
            names: names of the values that differ, for messages.

        Raises:
            ConfigError: it cannot be recorded, or not be cut at the same places.
        """
        with self._lock:  # of threads that were given one model the first records it
            self._refresh(slot, environment, names)

    def _refresh(self, slot: RecordSlot, environment: Environment, names: Sequence[str]) -> None:
        model = self.model
        if model is None:
            return
        replaced = self._refuse_replaced(model, slot, environment, names)
        for variant in self._variants[slot]:
            now = guards_of(model, variant.reads, environment)
            if not variant.guards.differences(now):
                variant.guards, variant.replaced = now, replaced
                self.current[slot] = variant
                return
        recorded = self._of_evaluation(model, slot, environment)
        if recorded is None:
            with capturing():
                recorded = self._record(model, slot, environment, names)
        variant = recorded
        variant.replaced = replaced
        self.current[slot] = variant
        self._variants[slot].append(variant)
        del self._variants[slot][:-_VARIANTS]

    def refuse_length(
        self, slot: RecordSlot, environment: Environment, inputs: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse sequences of a length for which the model does something else; a new one is recorded.

        Raises:
            ConfigError: the model does something else.
        """
        lengths, model = self._example.lengths_of(inputs, kwargs), self.model
        key = tuple(lengths[group] for group in sorted(lengths))
        with self._lock:
            variant = self.current[slot]
            if model is None or key in variant.lengths or lengths.items() <= sizes_of(self._example).items():
                return
            try:
                with capturing():
                    run = self._run(model, slot, environment, lengths)
                refuse_differences(variant.record, run, sizes_of(self._example) | lengths)
            except (Unfollowed, Varies) as error:
                raise self._error(
                    f"its forward does not do for sequences of length {str(key)[1:-1].rstrip(',')} what it "
                    f"does for those of the example ({error}); move the code that decides by lengths into a "
                    "module of its own"
                ) from None
            if len(variant.lengths) < _LENGTHS:
                variant.lengths.add(key)

    def _of_evaluation(self, model: nn.Module, slot: RecordSlot, environment: Environment) -> Variant | None:
        evaluation = self.current[RecordSlot.EVALUATION]
        if slot is not RecordSlot.TRAINING or any(module.training for module in model.modules()):
            return None
        if evaluation.guards.state.asks_for_gradients or self.stale(RecordSlot.EVALUATION, environment):
            return None
        variant = copy.copy(evaluation)
        modes = {(path, "training") for path in self._opened}
        variant.reads = evaluation.reads._replace(attributes=evaluation.reads.attributes | modes)
        variant.guards = guards_of(model, variant.reads, environment)
        return variant

    def _record(
        self, model: nn.Module, slot: RecordSlot, environment: Environment, names: Sequence[str]
    ) -> Variant:
        try:
            record = self._run(model, slot, environment)
            parts = self._recut(model, record, slot)
        except Unfollowed as error:
            raise self._refusal(names, f"its forward {error.why}") from error.__cause__
        except Varies as error:
            raise self._refusal(
                names, f"its forward depends on the sizes of the mini-batch ({error})"
            ) from None
        except Uncut:
            raise self._refusal(names, "other tensors would cross between the layers") from None
        for number, part in enumerate(parts):
            self._refuse_foreign(model, number, part, names)
        reads = self._reads(record, evaluates=slot is RecordSlot.EVALUATION)
        variant = Variant(reads, guards_of(model, reads, environment), parts, record)
        paths = {step.module for part in parts for step in part.steps} - {None}
        variant.called = {path: model.get_submodule(path) for path in paths if path is not None}
        return variant

    def _run(  # a run with some sizes, or a record
        self, model: nn.Module, slot: RecordSlot, environment: Environment, sizes: Any = None
    ) -> Record:
        return record_again(
            model,
            self._example,
            self._opened,
            mark=self.mark,
            evaluates=slot is RecordSlot.EVALUATION,
            grad_in_evaluation=self._grad,
            autocast=environment.autocast,
            sizes=sizes,
        )

    def _recut(self, model: nn.Module, record: Record, slot: RecordSlot) -> list[LayerSteps]:
        for variant in (self.current[slot], self.current[1 - slot]):
            try:
                places = places_of(record, variant.parts, variant.crossings)
            except Uncut:
                continue
            parts = parts_of(record, self._example, places, model)
            known = zip(*(current.crossings for current in self.current), strict=True)
            if all(map(contains, known, crossings_of(record, parts))):
                return parts
        raise Uncut

    def _reads(self, record: Record, *, evaluates: bool) -> RecordDependencies:
        names = frozenset(r for r in record.reads if not (evaluates and r[1] == "training"))
        fixed = self.mark is None
        return RecordDependencies(names, self._opened, frozenset(record.observed), has_dtypes=fixed)

    def _assume_training(self) -> None:
        variant = self.current[RecordSlot.TRAINING]
        for path, name in variant.reads.attributes:
            if name == "training":
                variant.guards.state.tokens[f"{path}.training" if path else name] = Plain(value=True)
        variant.guards = variant.guards.with_values(variant.guards, ())

    def _refuse_replaced(
        self, model: nn.Module, slot: RecordSlot, environment: Environment, names: Sequence[str]
    ) -> dict[str, Any]:
        before = self.current[slot].guards
        now = guards_of(model, self.current[slot].reads, environment)
        hooks = [
            n
            for n in names
            if n.startswith(HOOK) and {n} <= before.state.tokens.keys() & now.state.tokens.keys()
        ]
        if hooks:
            raise self._error(
                f"{hooks[0]} was registered or removed after the layers were found, and some of these "
                "modules run as their steps, without hooks; register hooks before"
            )
        replaced: dict[str, Any] = {}
        modules = dict(model.named_modules())
        for path, old in self._called.items():
            new = modules.get(path, old)
            if new is not old:
                if any(True for m in (old, new) for _ in (*m.parameters(), *m.buffers())):
                    raise self._error(
                        f"{path!r} was replaced by a {type(new).__name__} after the layers were found, and "
                        "stages train the weights that they were made with; make another pipeline"
                    )
                replaced[path] = new
        for name, old_weight in before.weights.items():
            weight: Any = now.weights.get(name)
            if weight == old_weight:
                continue
            tensor, old_tensor = getattr(weight, "value", None), getattr(old_weight, "value", None)
            if not _replaceable(tensor, old_tensor):
                raise self._error(
                    f"{name!r} was replaced after the layers were found, and stages have the tensor that "
                    "they were made with; change it in place (copy_), or make another pipeline"
                )
            replaced[name] = tensor
        return replaced

    def _refuse_foreign(self, model: nn.Module, number: int, part: LayerSteps, names: Sequence[str]) -> None:
        for name in held_names(part):
            if not name.startswith("constant ") and name not in self._names[number]:
                raise self._refusal(names, f"layer {number} would use {name!r}, which it did not before")
        for step in part.steps:
            if step.module is not None and step.module not in self._called_paths[number]:
                module = model.get_submodule(step.module)
                if any(True for _ in (*module.parameters(), *module.buffers())):
                    raise self._refusal(names, f"it would call {step.module!r}, which it did not before")

    def _refusal(self, names: Sequence[str], why: str) -> ConfigError:
        shown = ", ".join(dict.fromkeys(names[:3]))
        return self._error(
            f"{shown} changed after the layers were found, and the model cannot be recorded again: {why}; "
            "set it before, or move the code that reads it into a module of its own"
        )

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{type(self.model).__name__}: {text}")


def _replaceable(tensor: object, before: object) -> bool:
    return (
        isinstance(tensor, Tensor)
        and isinstance(before, Tensor)
        and not isinstance(before, nn.Parameter)
        and not isinstance(tensor, nn.Parameter)
        and (tensor.shape, tensor.dtype) == (before.shape, before.dtype)
    )


def _nothing() -> None:
    return None


def recordings_of(layers: Sequence[nn.Module]) -> list[Recording]:
    """The recordings that layers share, each once."""
    recordings = [layer.recording for layer in layers if isinstance(layer, CapturedLayer)]
    return list(
        {id(recording): recording for recording in recordings if isinstance(recording, Recording)}.values()
    )


def follow_model(layers: Sequence[nn.Module]) -> None:
    """Let layers outside of a pipeline run their models as these are now, in their own modes.

    Raises:
        ConfigError: a model has changed, and cannot be recorded as it is.
    """
    captured = [layer for layer in layers if isinstance(layer, CapturedLayer)]
    environment = Environment.current("cpu")
    for recording in recordings_of(layers):
        recording.settle()
        if names := recording.stale(RecordSlot.TRAINING, environment):
            recording.refresh(RecordSlot.TRAINING, environment, names)
            for layer in captured:
                if layer.recording is recording:
                    layer.adopt(recording.current[RecordSlot.TRAINING], RecordSlot.TRAINING)
    for layer in captured:
        layer.follows = True
