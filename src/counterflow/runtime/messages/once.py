"""Tensors within values that are the same for all micro-batches of a step: they go with the first one alone.

In the step that learns shapes the sender compares what goes over a link, from a stage to the next one or by a
skip, with what went with the receiver's first micro-batch, and tells with the description what is the same.
From then on later messages are without it, and the receiver takes copies of what it kept of the first one.
Each time the sender compares again; what differs after all follows in full, beside the message, and marks in
the message tell of it.

Invariant: a stage gets what it would get if everything went with every micro-batch, in memory of its own;
what is the same is known by its bits, never by its place in memory. To compare on a GPU would wait for it:
there all goes with every micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from counterflow.schedule.workload import SkipLink

from .values import NOTHING_SAME, BufferPool, Layout, Same, TensorSpec, Unit

Link = tuple[int | SkipLink, int, int]
"""The stage or skip that gives, the pipe, and the slot of the mini-batch."""

LEAST_BYTES = 1024
"""Tensors of fewer bytes go with every micro-batch: to compare them would gain nothing."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Sharing:
    """What of a message goes once a step.

    Attributes:
        link: that it goes by.
        last: whether it is the link's last one of the mini-batch, in this worker's order.
        specs: of all tensors that it is about.
        travels: of those that go with it, and of the marks.
        kept: the places of those that later messages may be without.
        once: by the place of each tensor that it is without, that in the first micro-batch's value.
    """

    link: Link
    last: bool
    specs: Sequence[TensorSpec]
    travels: list[TensorSpec]
    kept: Sequence[int]
    once: dict[int, int]


class OncePerStep:
    """What one worker has sent and what has come to it, of what goes once a step.

    Args:
        pool: where copies are taken from.
        reads: whether tensors may be compared.
    """

    def __init__(self, pool: BufferPool, *, reads: bool) -> None:
        self._pool = pool
        self._reads = reads
        self._sent: dict[Link, tuple[int, dict[int, Tensor]]] = {}
        self._come: dict[Link, dict[int, Tensor]] = {}

    def learn(
        self,
        link: Link,
        step: int,
        tensors: Sequence[Tensor],
        units: Sequence[tuple[int, int]],
        *,
        first: bool,
    ) -> list[Same]:
        """What of a message with all its tensors is the same as in the first one, by unit.

        Args:
            link: that it goes by.
            step: of its mini-batch.
            tensors: of all its units.
            units: how many of them each has, and its samples.
            first: whether it is with the receiver's first micro-batch.
        """
        if not self._reads:
            return [NOTHING_SAME] * len(units)
        found: list[Same] = []
        at = 0
        for count, samples in units:
            own, at = tensors[at : at + count], at + count
            if first and not found:
                places = [place for place, tensor in enumerate(own) if _may_be_same(tensor, samples)]
                self._keep(link, step, own, places)
                found.append(Same(kept=frozenset(places)))
                continue
            before = self._kept(link, step)
            places = [p for p, old in before.items() if p < count and _is_same(own[p], old)]
            found.append(Same(once=frozenset(places)))
        return found

    def to_send(
        self, sharing: Sharing, step: int, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What goes with a message, and what follows in full because it differs from the first one's."""
        link, once = sharing.link, sharing.once
        if sharing.kept:
            self._keep(link, step, tensors, sharing.kept)
        message = [tensor for place, tensor in enumerate(tensors) if place not in once]
        full: list[Tensor] = []
        if once:
            before = self._kept(link, step)
            marks = [p not in before or not _is_same(tensors[at], before[p]) for at, p in once.items()]
            full = [tensors[at] for at, differs in zip(once, marks, strict=True) if differs]
            message.append(torch.tensor(marks, dtype=torch.uint8))
        if sharing.last:
            self._sent.pop(link, None)
        return message, full

    def restored(
        self, sharing: Sharing, message: Sequence[Tensor], rest: Callable[[], Sequence[Tensor]]
    ) -> list[Tensor]:
        """All tensors that a message is about, in buffers of the pool.

        Args:
            sharing: of the message.
            message: what came.
            rest: receives what follows in full; the last tensors of that are meant.
        """
        link, once = sharing.link, sharing.once
        if sharing.kept:
            self._pool.give([*self._come.pop(link, {}).values()])
            self._come[link] = {p: self._copy(sharing.specs[p], message[p]) for p in sharing.kept}
        found = [*message]
        if once:
            came = iter(message)
            marks = message[-1].tolist()
            full = iter(rest()[-sum(marks) :] if any(marks) else ())
            differs = dict(zip(once, marks, strict=True))
            found = [
                next(came)
                if at not in once
                else self._copy(spec, next(full) if differs[at] else self._come[link][once[at]])
                for at, spec in enumerate(sharing.specs)
            ]
            self._pool.give([message[-1]])
        if sharing.last:
            self._pool.give([*self._come.pop(link, {}).values()])
        return found

    def clear(self) -> None:
        """Let all go: nothing is under way."""
        self._sent.clear()
        for kept in self._come.values():
            self._pool.give([*kept.values()])
        self._come.clear()

    def _keep(self, link: Link, step: int, tensors: Sequence[Tensor], places: Sequence[int]) -> None:
        """Keep contents: the memory may be written to before the next message."""
        if places:
            self._sent[link] = step, {place: tensors[place].detach().clone() for place in places}

    def _kept(self, link: Link, step: int) -> dict[int, Tensor]:
        """Of this mini-batch's first message; nothing if that has not been sent yet."""
        its_step, found = self._sent.get(link, (step, {}))
        return found if its_step == step else {}

    def _copy(self, spec: TensorSpec, source: Tensor) -> Tensor:
        with torch.no_grad():
            return self._pool.take(spec).copy_(source)


def forget_others(learnt: dict[tuple[int | SkipLink, Unit], Layout]) -> None:
    """Keep of first messages what later ones are without, and nothing else, once all have been seen."""
    once: dict[int | SkipLink, frozenset[int]] = defaultdict(frozenset)
    for (source, _), layout in learnt.items():
        once[source] |= layout.same.once
    for of, layout in learnt.items():
        same = layout.same
        learnt[of] = replace(layout, same=same._replace(kept=same.kept & once[of[0]]))


def _may_be_same(tensor: Tensor, samples: int) -> bool:
    """Whether it is worth it, takes no gradient and shows no samples in its first dimension.

    >>> import torch
    >>> _may_be_same(torch.zeros(32, 32), 4), _may_be_same(torch.zeros(4, 256), 4)
    (True, False)
    """
    return (
        type(tensor) is Tensor
        and not tensor.requires_grad
        and tensor.nbytes >= LEAST_BYTES
        and not (samples > 1 and tensor.dim() > 0 and tensor.shape[0] == samples)
    )


def _is_same(new: Tensor, old: Tensor) -> bool:
    """Whether two tensors have the same bits; ``old`` takes no gradient."""
    if new.requires_grad or new.dtype is not old.dtype or new.shape != old.shape:
        return False
    return torch.equal(_bits(new), _bits(old))


def _bits(tensor: Tensor) -> Tensor:
    """As integers: a zero is not a negative zero, and what is not a number equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().resolve_neg().view(_INTEGERS[tensor.element_size()])
