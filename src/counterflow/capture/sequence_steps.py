"""Steps of layers on slices of a sequence, or on its tokens one after another.

A tensor that follows by functions of torch from sizes, an attention mask and position ids is a **context**
tensor: positions, masks, tables. It is computed for the whole sequence so far, and each step takes the rows
of the slice's positions. A context tensor with a value for each pair of positions does not cross between
layers: each layer that takes it repeats the steps that make it.

Two things carry a state from slice to slice: attention of torch (keys and values), and the inputs in
``_SAVED``. Whatever else looks at earlier positions differs between slices and the whole sequence, which the
pipeline compares.

Invariant: on a whole sequence these are the record's own steps, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from torch.utils import _pytree as pytree

from .call_arguments import DRAWING
from .example_call import Example
from .placeholders import Member, Ref, Size
from .record import ATTENTION, AttentionCall, Record, RecordedCall

_SAVED = "attention_mask", "position_ids"
"""Inputs of which layers save earlier slices: masks and positions follow from them."""


class SequenceRow(NamedTuple):
    """Steps of a layer on slices, of which ``SequenceSteps`` and ``LayerSteps`` document the parts."""

    takes: tuple[Ref, ...]
    steps: tuple[RecordedCall, ...]
    frees: tuple[tuple[Ref, ...], ...]
    length: int
    context: tuple[RecordedCall, ...]
    inputs: tuple[Ref, ...]
    dims: Mapping[Ref, tuple[int, ...]]
    attentions: tuple[tuple[AttentionCall, ...], ...]


class Unsliceable(Exception):  # noqa: N818 - nothing is wrong with the model
    """A model, or a layer, that cannot run on slices of a sequence."""


def sequence_rows(record: Record, example: Example, places: Sequence[int]) -> list[SequenceRow] | str:
    """Steps by layer; a text says why the model has none.

    Args:
        record: record of the model's forward.
        example: example of the call.
        places: number of steps before each layer, and of all steps.
    """
    lengths = {group for free in example.free for number, (_, group) in enumerate(free) if number}
    if len(lengths) != 1:
        many = "several lengths" if lengths else "no length"
        return f"the example has {many} of a sequence that may vary"
    try:
        return _Sequence(record, example, places, *lengths).parts()
    except Unsliceable as why:
        return str(why)


class _Sequence:
    def __init__(self, record: Record, example: Example, places: Sequence[int], length: int) -> None:
        self._record, self._places, self._length = record, places, length
        self._context = _known_inputs(record, example)
        self._makes_context: set[int] = set()
        for number, step in enumerate(record.steps):
            if self._is_of_context(number, step):
                self._makes_context.add(number)
                self._context |= {ref for _, ref in step.gives}
        self._dims = {ref: self._dims_of(ref) for ref in self._context}

    def _is_of_context(self, number: int, step: RecordedCall) -> bool:
        if step.module is not None or getattr(step.function, "__name__", "") in DRAWING:
            return False
        if number in self._record.changes:
            if step.takes.refs & self._context:
                raise Unsliceable(f"{_place(step)} changes positions or a mask in place")
            return False
        weights = any(isinstance(leaf, Member) for leaf in step.takes.leaves())
        return step.takes.refs <= self._context and not (weights and step.takes.refs)

    def _dims_of(self, ref: Ref) -> tuple[int, ...] | None:
        """Dimensions of the positions; None: a dimension depends on their number in another way."""
        dims = []
        for dim, size in enumerate(self._record.shapes[ref][0]):
            if size is None or (isinstance(size, Size) and self._length in size.groups):
                if size != Size((self._length,), Fraction(1)):
                    return None
                dims.append(dim)
        return tuple(dims)

    def _is_pairwise(self, ref: Ref) -> bool:
        return ref in self._context and len(self._dims[ref] or ()) > 1

    def parts(self) -> list[SequenceRow]:
        needed: set[Ref] = set()  # by later layers
        parts = []
        for number in reversed(range(len(self._places) - 1)):
            part = self._part(number, needed)
            parts.append(part)
            needed = set(part.takes)
        return parts[::-1]

    def _part(self, number: int, later: set[Ref]) -> SequenceRow:
        record, begin, end = self._record, self._places[number], self._places[number + 1]
        numbers = [n for n in range(begin, end) if n not in self._makes_context]
        last = number == len(self._places) - 2
        used = {ref for n in numbers for ref in record.steps[n].takes.refs}
        for n in numbers:
            self._refuse_sums(record.steps[n])
        used |= record.output.refs if last else set()

        def is_here(ref: Ref) -> bool:
            return begin <= ref.step < end or (not number and ref.step < 0)

        roots = {ref for ref in used | later if ref in self._context and ref.step >= 0}
        roots = {ref for ref in roots if is_here(ref) or self._is_pairwise(ref)}
        context, inputs = self._closure(roots, begin)
        before = {ref for ref in used | later if not is_here(ref) and not self._is_pairwise(ref)}
        takes = before | set(inputs) if number else set()
        uses = {ref: n for n in numbers for ref in record.steps[n].takes.refs}
        lasting = later | (record.output.refs if last else set())
        steps = tuple(record.steps[n] for n in numbers)
        frees = []
        for n, step in zip(numbers, steps, strict=True):
            refs = step.takes.refs | {ref for _, ref in step.gives}
            frees.append(tuple(ref for ref in refs if uses.get(ref, n) == n and ref not in lasting))
        results = [ref for step in context for _, ref in step.gives]
        return SequenceRow(
            tuple(sorted(takes)),
            steps,
            tuple(frees),
            self._length,
            context,
            inputs,
            {ref: self._known_dims(ref) for ref in results if ref in used | later},
            tuple(map(self._attentions, steps)),
        )

    def _closure(self, roots: Iterable[Ref], begin: int) -> tuple[tuple[RecordedCall, ...], tuple[Ref, ...]]:
        """Steps that make context tensors, and inputs of the model that these take."""
        numbers: set[int] = set()
        inputs: set[Ref] = set()
        waiting = list(roots)
        while waiting:
            ref = waiting.pop()
            if ref.step < 0:
                inputs.add(ref)
            elif ref.step not in numbers:
                numbers.add(ref.step)
                step = self._record.steps[ref.step]
                if ref.step < begin and any(isinstance(leaf, Member) for leaf in step.takes.leaves()):
                    raise Unsliceable(f"{_place(step)} makes a mask for other layers of a buffer or a weight")
                waiting += step.takes.refs
        return tuple(self._record.steps[n] for n in sorted(numbers)), tuple(sorted(inputs))

    def _refuse_sums(self, step: RecordedCall) -> None:
        for ref in step.takes.refs & self._context:
            if ref.step >= 0 and not self._dims[ref] and self._closure([ref], 0)[1]:
                raise Unsliceable(f"{_place(step)} takes one value for all positions of a sequence")

    def _known_dims(self, ref: Ref) -> tuple[int, ...]:
        dims = self._dims[ref]
        if dims is None:
            shown = _place(self._record.steps[ref.step])
            raise Unsliceable(f"{shown} makes a tensor whose size depends on the length in another way")
        return dims

    def _attentions(self, step: RecordedCall) -> tuple[AttentionCall, ...]:
        calls = self._calls(step)
        if any(not call.causal and not call.masked for call in calls):
            raise Unsliceable(f"{_place(step)} has attention to both sides of a position")
        if not calls and any(map(self._is_pairwise, step.takes.refs)):
            raise Unsliceable(
                f"{_place(step)} takes a value for each pair of positions, but does not call torch's "
                f"{ATTENTION}"
            )
        return calls

    def _calls(self, step: RecordedCall) -> tuple[AttentionCall, ...]:
        if step.module is not None or getattr(step.function, "__name__", "") != ATTENTION:
            return step.attentions
        args, kwargs = pytree.tree_unflatten(step.takes.parts, step.takes.spec)
        call = AttentionCall.of(*args, **kwargs)
        shapes = [self._record.shapes[ref][0] if isinstance(ref, Ref) else () for ref in args[:2]]
        if not any(isinstance(size, Size) and self._length in size.groups for size in shapes[1][-2:-1]):
            return ()  # keys of something else, all of which are known
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        dims = len(shapes[0])
        if dims != 4:
            raise Unsliceable(f"{_place(step)} has attention of tensors with {dims} dimensions in place of 4")
        if mask is not None and not (isinstance(mask, Ref) and self._is_pairwise(mask)):
            raise Unsliceable(f"{_place(step)} has attention with a mask that modules compute")
        return (call,)


def _known_inputs(record: Record, example: Example) -> set[Ref]:
    _, named = pytree.tree_unflatten(list(range(len(example.leaves))), example.spec)
    numbers = (named[name] for name in _SAVED if type(named.get(name)) is int)
    return {record.inputs[number] for number in numbers if number in record.inputs}


def _place(step: RecordedCall) -> str:
    path = step.module if step.module is not None else step.inside
    return repr(path) if path else "the model"
