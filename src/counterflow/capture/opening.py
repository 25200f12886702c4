"""Choice of the modules of a model that are traced, and the records of its forward in both modes.

Invariant: modules that are opened in training are opened in evaluation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from counterflow.common.tensors.divided_modules import is_divided_whole
from counterflow.errors import ConfigError

from .contexts import autocast_of
from .effects import globals_of, lru_caches
from .example_call import Example, FreeLengths, example_of
from .guards import Environment, RecordDependencies, guards_of
from .marks import MARKS, VariesByDtype, with_named_dtypes
from .output_hooks import register_output_hooks
from .record import Record, main_dtype
from .recorder import Recorder
from .sizes import Varies, merged, other_sizes, sizes_of
from .tracing_internals import has_hooks
from .untraceable import Unfollowed

_SHARE = 1 / 12
"""Share of a model's cost from which an atom is opened."""

_OPENED_OF_TORCH = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclass(frozen=True, slots=True)
class Records:
    """Records of a model.

    Attributes:
        training: steps in training.
        evaluation: steps in evaluation.
        example: example of the call.
        opened: paths of the opened modules.
        mark: dtype of the weights of the runs.
        grad_in_evaluation: whether evaluation was recorded with gradients.
        closed: modules that could not be traced, with what their forward does.
    """

    training: Record
    evaluation: Record
    example: Example
    opened: frozenset[str]
    mark: torch.dtype | None
    grad_in_evaluation: bool
    closed: Mapping[str, str]


def records_of(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any], dim: int | None) -> Records:
    """The records of a model's forward.

    Raises:
        ConfigError: the forward cannot be traced.
    """
    errors: list[Unfollowed] = []
    by_dtype, autocast = False, autocast_of("cpu")
    register_output_hooks(model, {*kwargs, *(inputs if isinstance(inputs, Mapping) else ())})
    for mark in MARKS:
        if mark is not None and by_dtype:
            continue
        for example in _examples(model, inputs, kwargs, dim):
            try:
                return _Opening(model, example, mark=mark, autocast=autocast).records()
            except Unfollowed as error:
                if not example.has_free_numbers:
                    errors.append(error)
            except VariesByDtype:
                by_dtype = True
                break
            except Varies as error:
                if not any(example.free):
                    errors.append(Unfollowed("", f"does not do the same in each run ({error})"))
    raise ConfigError(_refusal(model, errors[0])) from errors[0].__cause__


def _examples(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any], dim: int | None) -> Iterator[Example]:
    # with fewer and fewer free dimensions
    free: object = None
    for lengths, sample_dim in (*((lengths, dim) for lengths in FreeLengths), (FreeLengths.NONE, None)):
        example = example_of(model, inputs, kwargs, sample_dim, lengths)
        if example.free != free:
            yield example
        free = example.free


def record_again(
    model: nn.Module,
    example: Example,
    opened: Collection[str],
    *,
    mark: torch.dtype | None,
    evaluates: bool,
    grad_in_evaluation: bool,
    autocast: torch.dtype | None,
    sizes: Mapping[int, int] | None = None,
) -> Record:
    """A record of a model that was recorded before, as it is now.

    Args:
        model: the model.
        example: example of the call.
        opened: paths of the modules that are traced.
        mark: as in ``Recorder``.
        evaluates: whether all modules are in evaluation mode; else each is in its own.
        grad_in_evaluation: whether evaluation is recorded with gradients.
        autocast: as in ``Recorder``.
        sizes: as in ``Recorder``, of the only run; None: several runs show what depends on sizes.

    Raises:
        Unfollowed: an opened module cannot be traced any more.
        Varies: the model takes another path for other sizes.
    """
    opening = _Opening(model, example, mark=mark, autocast=autocast, grad_in_evaluation=grad_in_evaluation)
    return opening.record(opened, sizes, training=False if evaluates else None)


_NO_VALUES = (
    "layers are found in a run on tensors that have shapes and no values, which modules that are not traced "
    "are called with as well: compute it without values (torch.where; a size or a flag that is no tensor)"
)
_TRACED = (
    "the forwards of the model and of its large blocks are traced: move this code out of the model's own "
    "forward into a module of its own, which is called and not traced"
)
"""What to change in a forward, by what it needs."""


def _refusal(model: nn.Module, error: Unfollowed) -> str:
    whose = f"the forward of {error.path!r}" if error.path else "its forward"
    where = f" ({error.line})" if error.line else ""
    return (
        f"the layers of the {type(model).__name__} cannot be found automatically: {whose} "
        f"{error.why}{where}; {_NO_VALUES if error.needs_values else _TRACED}, or give list_layers a "
        "function of your own that lists the layers"
    )


def _reason(error: Unfollowed) -> str:
    return f"{error.why} ({error.line})" if error.line else error.why


class _Opening:
    """Opens more and more modules of a model, until no atom is expensive or none can be opened.

    Args:
        model: the user's model.
        example: example of the call.
        mark: as in ``Recorder``.
        autocast: as in ``Recorder``.
        grad_in_evaluation: whether evaluation is recorded with gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        *,
        mark: torch.dtype | None,
        autocast: torch.dtype | None,
        grad_in_evaluation: bool = False,
    ) -> None:
        self._model, self._example, self._mark, self._autocast = model, example, mark, autocast
        self._by_path = dict(model.named_modules())
        self._opened = {""}
        self._closed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._costs: Mapping[str, float] | None = None
        self._grad_in_evaluation = grad_in_evaluation
        self._reachable = globals_of(model)
        self._caches = lru_caches(self._reachable)

    def records(self) -> Records:
        """Both records, with all modules opened that are to be.

        Raises:
            Unfollowed: the model itself cannot be opened.
            Varies: the model takes another path for other sizes.
        """
        while True:
            training = self._record(training=self._in_training)
            more = set(self._large(training))
            if more:
                self._opened |= more
                continue
            before = set(self._opened)
            evaluation = self._evaluation()
            if self._opened != before:
                continue
            try:
                self._refuse_live(training)
                self._refuse_live(evaluation)
                return Records(
                    self._freed(training, training=self._in_training),
                    self._freed(evaluation, training=False),
                    self._example,
                    frozenset(self._opened),
                    self._mark,
                    self._grad_in_evaluation,
                    dict(self._reasons),
                )
            except Varies as error:
                if not error.paths or self._example.has_free_numbers:
                    raise  # fewer free dimensions may need no module that is called as a whole
                for path in error.paths:
                    self._close(path, f"does not do the same in each run ({error})")
            except Unfollowed as error:
                if not error.path or error.path not in self._opened:
                    raise
                self._close(error.path, _reason(error))

    def record(
        self, opened: Collection[str], sizes: Mapping[int, int] | None, *, training: bool | None
    ) -> Record:
        """A record of the model as it is now, with the same modules opened.

        Raises:
            Unfollowed: an opened module cannot be traced any more.
            Varies: the model takes another path for other sizes.
        """
        self._opened, self._costs = set(opened), {}
        record = self._run(sizes or {}, training=training)
        self._refuse_live(record)
        if sizes is not None:
            return record
        return self._freed(record, training=training)

    def _refuse_live(self, record: Record) -> None:
        objects, opened = frozenset(record.observed), frozenset(self._opened)
        reads = RecordDependencies(frozenset(record.reads), opened, objects, has_dtypes=False)
        state = guards_of(self._model, reads, Environment.current("cpu")).state
        for path, why in state.refused:
            raise Unfollowed(self._opened_around(path), why)
        for label in record.live:
            if label in state.tokens:
                raise Unfollowed("", f"reads {label}, which a module that it calls changes")

    def _opened_around(self, path: str) -> str:
        while path and path not in self._opened:
            path = path.rpartition(".")[0]
        return path

    def _evaluation(self) -> Record:
        try:
            return self._record(training=False)
        except Unfollowed:
            if self._grad_in_evaluation:
                raise
            self._grad_in_evaluation = True
            return self._record(training=False)

    @property
    def _in_training(self) -> bool | None:
        return None if self._model.training else True

    def _record(self, *, training: bool | None) -> Record:
        while True:
            try:
                return self._run({}, training=training)
            except Unfollowed as error:
                if error.opens and self._may_trace(error.opens):
                    self._opened |= self._opened_with(error.opens)
                elif not error.path or error.path not in self._opened:
                    raise
                else:
                    self._close(error.path, _reason(error))

    def _opened_with(self, path: str) -> set[str]:
        """A module, those around it, and blocks of their classes, each of which would need a run."""
        parts = path.split(".")
        around = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        kinds = {type(self._by_path[path]) for path in around}
        blocks = {
            path for path, module in self._by_path.items() if type(module) in kinds and any(module.children())
        }
        return {path, *filter(self._may_trace, around | blocks)}

    def _close(self, path: str, why: str) -> None:
        self._reasons.setdefault(path, why)
        inside = {p for p in self._opened if p == path or p.startswith(f"{path}.")}
        self._opened -= inside
        self._closed |= inside

    def _run(
        self,
        sizes: Mapping[int, int],
        *,
        training: bool | None,
        marked: bool = True,
        reads: Mapping[tuple[str, str], str] | None = None,
    ) -> Record:
        recorder = Recorder(
            self._model,
            self._example,
            self._opened,
            sizes,
            training=training,
            grad=training is not False or self._grad_in_evaluation,
            mark=self._mark if marked else None,
            costs=self._costs,
            autocast=self._autocast,
            reachable=self._reachable,
            caches=self._caches,
            reads=reads or {},
        ).run()
        self._costs = recorder.costs
        return recorder

    def _freed(self, record: Record, *, training: bool | None) -> Record:
        alternatives = other_sizes(self._example)
        try:  # what the time or another process decides differs in a run with the same sizes
            records = [
                self._run(sizes, training=training, reads=record.reads) for sizes in alternatives or [{}]
            ]
        except Unfollowed as error:
            if not alternatives:
                raise
            raise Varies(str(error)) from error
        for name, reader in records[0].written.items():
            raise Unfollowed(
                self._opened_around(reader), f"reads {name}, which a module that it calls changes"
            )
        sizes = [sizes_of(self._example), *alternatives] if alternatives else [{}, {}]
        record = merged([record, *records], sizes)
        if self._mark is None:
            return record
        try:
            unmarked = self._run({}, training=training, marked=False)
        except Unfollowed:  # a function of torch that accepts fewer dtypes without values than with them
            return record
        return with_named_dtypes(record, unmarked, main_dtype(self._model), sizes[0])

    def _large(self, record: Record) -> Collection[str]:
        limit = record.costs.get("", 0.0) * _SHARE
        return [
            path
            for path in record.called
            if path not in self._opened
            and path not in self._closed
            and record.costs.get(path, 0.0) > limit
            and self._may_open(path)
        ]

    def _may_open(self, path: str) -> bool:
        module = self._by_path[path]
        if not any(True for _ in module.children()):
            return False
        forward = type(module).forward
        if forward.__module__.startswith("torch.nn") and not isinstance(module, _OPENED_OF_TORCH):
            return False
        return self._may_trace(path)

    def _may_trace(self, path: str) -> bool:
        parents = path.split(".")
        if any(".".join(parents[:n]) in self._closed for n in range(1, len(parents) + 1)):
            return False
        module = self._by_path[path]
        if isinstance(module, torch.jit.ScriptModule) or has_hooks(module):
            self._reasons.setdefault(path, "is compiled by torch.jit or has hooks, which are not traced")
            return False
        return not is_divided_whole(module)
