"""Ops, their products and the facts of their kinds. Plain, frozen data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Product(Enum):
    """Result of an op."""

    __hash__ = object.__hash__  # filled in like ``OpKind``

    OUTPUT = "output"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENTS = "weight gradients"

    @property
    def goes(self) -> int:
        """Number of stages further on at which the product is taken: 1 at the next stage, -1 at the one
        before, 0 at its own.
        """
        return _GOES[self]


_GOES = {Product.OUTPUT: 1, Product.INPUT_GRADIENT: -1, Product.WEIGHT_GRADIENTS: 0}


class Lane(Enum):
    """Part of a worker that an op occupies while it runs; ops of one lane run one after another, beside those
    of other lanes. Only ops of compute make products for other stages.

    The simulator of schedules reads it. The runtime runs the ops of a list one after another, and the player
    of programs refuses other lanes.
    """

    COMPUTE = "compute"


class Saved(Enum):
    """Tensors of a micro-batch that a stage stores from one op to a later one; ``OpKind`` says which ops
    begin and end their lives. Those of a state live from a slice to another one, see ``OpKind.carries``.
    """

    __hash__ = object.__hash__

    ACTIVATIONS = "activations"
    RECOMPUTED = "recomputed activations"
    WEIGHT_OPERANDS = "operands of weight gradients"
    STATE = "state of slices that is not among their activations, as far as it grows with them"
    SLICE_STATE = "state of a slice however short it is"
    STATE_GRADIENTS = "gradients of the state"


class OpKind(Enum):
    """Kind of an op, with its letter; a table of facts defines everything else, and all other code reads it.

    A backward makes two products at once. A split backward is two ops: the input gradient, for which the
    stage before waits, and the weight gradients, for which only the update waits. A recomputation makes none:
    it computes a forward again, whose graph the backward of the same stage and share then takes.

    Attributes:
        word: name of the kind.
        lane: part of its worker that it occupies.
        first: the product of its own stage that it needs, or None.
        takes: the product of another stage that it takes, or None; ``Product.goes`` says from where.
        makes: the products that it makes.
        saves: tensors that it stores for a later op of its stage, or None. If it frees others, it stores a
            part of them, so the life of that part begins when it has ended.
        restores: tensors that it stores again because they were not saved, or None.
        frees: tensors whose lives end with it.
        stash: change of the number of graphs that its stage holds: 1, -1 or 0.
        carries: number of slices further on at which its own stage takes the state that it leaves: 1, a
            forward's state, taken by the next slice's forward; -1, the state's gradient, taken by the slice
            before; 0: it leaves none.
        attends: True if a part of its work is attention between positions, which has no weights.
        again: the kind whose work it does again, or None; a backward only if outputs are recomputed and no
            recomputation has done it.
        verb: method of ``StagePass`` that it runs; empty: it has a task of its own.
        after: kinds without a product that precede it if a workload has them: they restore what it frees, or
            free what it restores.
        gives: the one of its products that goes to another stage, or None.
        is_forward: True if it needs nothing of its own stage, so it always computes complete micro-batches;
            in a sliced workload always one slice.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2; of the recomputation
    Yang et al., Group-based Interleaved Pipeline Parallelism (WPipe, ICLR 2022), appendix A.3, Figure 13.
    """

    __hash__ = (
        object.__hash__
    )  # the enum's own hash is a Python call, for each of the millions of keys that a plan looks up

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENTS = "W"
    RECOMPUTATION = "R"

    word: str
    lane: Lane
    first: Product | None
    takes: Product | None
    makes: tuple[Product, ...]
    saves: Saved | None
    restores: Saved | None
    frees: tuple[Saved, ...]
    stash: int
    carries: int
    attends: bool
    again: OpKind | None
    verb: str
    after: tuple[OpKind, ...]
    gives: Product | None
    is_forward: bool

    @property
    def halves(self) -> tuple[OpKind, ...]:
        """The kinds it is split into: itself, unless it makes two products."""
        if len(self.makes) < 2:
            return (self,)
        return tuple(maker_of(product) for product in self.makes)

    @property
    def half(self) -> bool:
        """True if it is one half of a split backward."""
        return len(self.makes) == 1 and not self.is_forward

    @property
    def rest(self) -> OpKind | None:
        """The second half of a split backward, if this is the first half; else None."""
        if len(self.makes) > 1:
            return None
        halves = (kind for kind in OpKind if kind.half and kind.takes is None and kind.first in self.makes)
        return next(halves, None)


# What else a new kind needs: docs/how-it-is-built.md, "A kind of op".
F, B, I, W, R = OpKind  # noqa: E741 - the letters of the papers, for orders
_OUT, _IN, _WEIGHTS = Product
_ACTIVATIONS, _RECOMPUTED, _OPERANDS, *_ = Saved


class _Facts(NamedTuple):
    word: str
    first: Product | None = None
    takes: Product | None = None
    makes: tuple[Product, ...] = ()
    saves: Saved | None = None
    restores: Saved | None = None
    frees: tuple[Saved, ...] = ()
    stash: int = 0
    carries: int = 0
    attends: bool = False
    again: OpKind | None = None
    lane: Lane = Lane.COMPUTE
    verb: str = ""


_GRAPH = (_ACTIVATIONS, _RECOMPUTED)
_FACTS = {
    F: _Facts("forward", None, _OUT, (_OUT,), saves=_ACTIVATIONS, stash=1, carries=1, attends=True),
    B: _Facts(
        "backward", _OUT, _IN, (_IN, _WEIGHTS), frees=_GRAPH, stash=-1, carries=-1, attends=True, again=F
    ),
    I: _Facts(
        "input gradient", _OUT, _IN, (_IN,), _OPERANDS, frees=_GRAPH, carries=-1, attends=True, again=F
    ),
    W: _Facts("weight gradients", _IN, None, (_WEIGHTS,), frees=(_OPERANDS,), stash=-1),
    R: _Facts("recomputation", _OUT, restores=_RECOMPUTED, attends=True, again=F, verb="recompute"),
}
for _kind, _facts in _FACTS.items():
    for _name, _fact in _facts._asdict().items():
        setattr(_kind, _name, _fact)
    _kind.gives = next((product for product in _kind.makes if product.goes), None)
    _kind.is_forward = _kind.first is None


def _follows(user: OpKind, kind: OpKind) -> bool:
    """True if an op follows one of another kind of its unit, which has no product that it could need."""
    if kind.makes or kind is user:
        return False
    if user.makes:
        return kind.restores is not None and kind.restores in user.frees
    return user.restores is not None and user.restores in kind.frees


for _kind in OpKind:
    _kind.after = tuple(kind for kind in OpKind if _follows(_kind, kind))


def maker_of(product: Product) -> OpKind:
    """Return the kind of op that makes only this product."""
    return next(kind for kind in OpKind if kind.makes == (product,))


class Op(NamedTuple):
    """Work of one stage on one micro-batch, a group of them, or a part of one.

    ``micro_batches`` are the micro-batches computed together (more than one in a doubled forward). ``part``
    of ``parts`` says which share of the micro-batch a divided backward computes; in a sliced workload, which
    slice of its sequence a forward or backward computes. A recomputation has the share of its backward.
    ``version`` is the number of updates the stage's weights have seen (0 in every synchronous scheme: the
    weights at the start of the mini-batch). All numbers count from 0.

    >>> str(Op(OpKind.FORWARD, stage=7, micro_batches=(3,)))
    'F3.7'
    >>> str(Op(OpKind.BACKWARD, stage=0, micro_batches=(4,), pipe=1, part=1, parts=2, version=3))
    'B4.0p1:1/2v3'
    """

    kind: OpKind
    stage: int
    micro_batches: tuple[int, ...]
    pipe: int = 0
    part: int = 0
    parts: int = 1
    version: int = 0

    def __str__(self) -> str:
        batches = self.micro_batches
        text = str(batches[0]) if len(batches) == 1 else f"({','.join(map(str, batches))})"
        text = f"{self.kind.value}{text}.{self.stage}"
        if self.pipe:
            text += f"p{self.pipe}"
        if self.parts != 1:
            text += f":{self.part}/{self.parts}"
        if self.version:
            text += f"v{self.version}"
        return text

    @property
    def work(self) -> float:
        """Work in micro-batches: 2 for a doubled forward, 0.5 for a half backward; of a slice as if all were
        equally long, see ``Workload.work``.
        """
        return len(self.micro_batches) / self.parts

    @property
    def boundary(self) -> int:
        """The stage whose output it gives to another stage, or the gradient of whose output."""
        return boundary(self.kind, self.stage)


def boundary(kind: OpKind, stage: int) -> int:
    """The stage whose output, or the gradient of whose output, an op of this kind and stage gives."""
    return stage if kind.gives is Product.OUTPUT else stage - 1
