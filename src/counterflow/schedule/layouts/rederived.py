"""A layout for another number of layers, pipeline ranks or virtual stages, with what is special about it.

The stages with the embedding, MTP layers and the loss are special: each counts as the number of transformer
layers by which it has fewer than a usual stage. These numbers are kept, and transformer layers are dealt out
so that the fullest stage has as few as possible. Where stages cannot be equal, later ones have more, because
the first stages hold the most activations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from counterflow.errors import ConfigError

from .megatron_layout import LayerKind, Layout, Stage


@dataclass(frozen=True, slots=True)
class Rederived:
    """A layout that was re-derived.

    Attributes:
        layout: the new one.
        original: the one that it was made of.
        pp: pipeline ranks.
        vpp: virtual stages of each rank.
        usual: transformer layers of a stage that has nothing else, most often, in the given layout.
        embedding: transformer layers that the embedding counts as.
        loss: transformer layers that the loss, and the MTP layers that share its stage, count as.
        mtp: transformer layers that MTP layers in stages of their own count as.
    """

    layout: Layout
    original: Layout
    pp: int
    vpp: int
    usual: int
    embedding: int
    loss: int
    mtp: int

    @property
    def changed(self) -> bool:
        """True if the stages are others than those of the original layout."""
        return self.layout != self.original

    def chunk(self, rank: int, number: int) -> Stage:
        """The layers of a rank's virtual stage: stage ``number * pp + rank``."""
        return self.layout.stages[number * self.pp + rank]


def rederive(
    layout: Layout,
    *,
    layers: int | None = None,
    mtp: int | None = None,
    stages: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
) -> Rederived:
    """A layout for other layers or stages; what is not given stays.

    Args:
        layout: the one at hand.
        layers: transformer layers, 1 or more.
        mtp: MTP layers, 0 or more.
        stages: in place of ``pp`` or ``vpp``: stages of all ranks.
        pp: pipeline ranks. Alone it keeps the stages, as Megatron-LM reads a layout: ``vpp`` follows.
        vpp: virtual stages of each rank; with ``pp``, or beside ``stages``.

    Raises:
        ConfigError: embedding, MTP or loss are misplaced, numbers do not fit together, or there are too few
            layers.

    >>> at_hand = Layout.read("Et*4|(t*4|)*14,tmL")
    >>> str(rederive(at_hand, pp=8, vpp=1).layout)
    'Et*8|(t*8|)*6,t*5,mL'
    >>> str(rederive(Layout.read("Et*3|(tt|)*29,m|L"), layers=48, pp=8, vpp=2).layout)
    'Et*4|(t*3|)*9,(t*4|)*4,tm|L'
    """
    layout.refuse_misplaced()
    pp, vpp = _sizes(len(layout.stages), stages, pp, vpp)
    have = layout.count(LayerKind.TRANSFORMER)
    for name, value, least in (("layers", layers, 1), ("mtp", mtp, 0)):
        if value is not None and not least <= value <= _MOST:
            raise ConfigError(f"{name}={value}: must be {least} to {_MOST:,}")
    special = _Special.of(layout)
    wanted = have if layers is None else layers
    renewed = special if mtp is None else special.with_mtp(mtp, layout)
    result = layout
    if (len(layout.stages), have, special) != (pp * vpp, wanted, renewed):
        result = renewed.dealt(wanted, pp * vpp)
    loads = renewed.tail[-1].load, sum(part.load for part in renewed.tail[:-1])
    return Rederived(result, layout, pp, vpp, special.usual, special.embedding, *loads)


_MOST = 10_000


def _sizes(now: int, stages: int | None, pp: int | None, vpp: int | None) -> tuple[int, int]:
    for name, value in (("stages", stages), ("pp", pp), ("vpp", vpp)):
        if value is not None and not 1 <= value <= _MOST:
            raise ConfigError(f"{name}={value}: must be 1 to {_MOST:,}")
    if stages is not None and pp is not None and vpp is not None and stages != pp * vpp:
        raise ConfigError(f"stages={stages}: expected pp * vpp = {pp * vpp}; leave one of them out")
    if pp is not None and vpp is not None:
        stages = pp * vpp
        if stages > _MOST:
            raise ConfigError(f"pp={pp}, vpp={vpp}: {stages:,} stages, at most {_MOST:,} are made")
        return pp, vpp
    if pp is None and vpp is not None and stages is None:
        raise ConfigError(f"vpp={vpp}: says nothing without the number of ranks; give pp, too")
    count = now if stages is None else stages
    known, name = (pp, "pp") if pp is not None else (vpp or 1, "vpp")
    if count % known:
        raise ConfigError(
            f"{name}={known}: {count} stages do not divide by it; give pp and vpp, which make pp * vpp stages"
        )
    return (known, count // known) if name == "pp" else (count // known, known)


@dataclass(frozen=True, slots=True)
class _Tail:
    """A stage with MTP layers, with the loss, or with both.

    Attributes:
        kinds: what it has besides transformer layers.
        load: transformer layers that these count as.
    """

    kinds: Stage
    load: int


@dataclass(frozen=True, slots=True)
class _Special:
    """Irregular stages of a layout.

    Attributes:
        usual: transformer layers of a usual stage.
        embedding: transformer layers that the embedding counts as.
        tail: the stages from the first with an MTP layer or the loss on.
    """

    usual: int
    embedding: int
    tail: tuple[_Tail, ...]

    @classmethod
    def of(cls, layout: Layout) -> _Special:
        """The special stages of a layout whose embedding, MTP layers and loss are in their places."""
        plain = [len(stage) for stage in layout.stages if stage and {*stage} == {LayerKind.TRANSFORMER}]
        counts = plain or [stage.count(LayerKind.TRANSFORMER) for stage in layout.stages]
        often = Counter(counts)
        usual = max(often, key=lambda count: (often[count], count))
        tail = tuple(
            _Tail(rest, usual - stage.count(LayerKind.TRANSFORMER))
            for stage in layout.stages
            if (rest := tuple(kind for kind in stage if kind in (LayerKind.MTP, LayerKind.LOSS)))
        )
        alone = layout.stages[0].count(
            LayerKind.LOSS
        )  # a single stage: nothing is lighter than anything else
        return cls(usual, 0 if alone else usual - layout.stages[0].count(LayerKind.TRANSFORMER), tail)

    def with_mtp(self, count: int, layout: Layout) -> _Special:
        """The same with this number of MTP layers, in the stage of those at hand or of the loss."""
        places = [number for number, part in enumerate(self.tail) if LayerKind.MTP in part.kinds]
        now = layout.count(LayerKind.MTP)
        if count == now:
            return self
        if len(places) > 1:
            raise ConfigError(
                f"mtp={count}: the {now} MTP layers lie in {len(places)} stages; put them in one stage first"
            )
        place = places[0] if places else len(self.tail) - 1
        old = self.tail[place]
        with_loss = LayerKind.LOSS in old.kinds
        # What one counts as: as a transformer layer beside the loss, else its share of its stage.
        load_each = 1 if with_loss else max(1, old.load // now)
        load = old.load + (count - now) * load_each
        new = _Tail((*[LayerKind.MTP] * count, *[LayerKind.LOSS] * with_loss), load)
        return _Special(
            self.usual,
            self.embedding,
            tuple(
                new if number == place else part
                for number, part in enumerate(self.tail)
                if number != place or new.kinds
            ),
        )

    def dealt(self, layers: int, stages: int) -> Layout:
        """The layout of these special stages, and of transformer layers dealt out over all stages."""
        tail = list(self.tail)
        while len(tail) > max(1, stages - 1):
            first, second, *rest = tail
            tail = [_Tail(first.kinds + second.kinds, first.load + second.load), *rest]
        if stages == 1:
            return Layout(((LayerKind.EMBEDDING, *[LayerKind.TRANSFORMER] * layers, *tail[0].kinds),))
        plain = stages - len(tail) - 1
        # Transformer layers come before MTP layers and the loss: of the tail only the first stage has some.
        loads = [self.embedding, *[0] * plain, tail[0].load]
        counts = _filled(loads, layers)
        if empty := counts[1:-1].count(0):
            raise ConfigError(
                f"layers={layers}: leaves {empty} of {stages} stages empty; give more layers or fewer stages"
            )
        result: list[Stage] = [tuple([LayerKind.TRANSFORMER] * count) for count in counts]
        result[0] = (LayerKind.EMBEDDING, *result[0])
        result[-1] = (*result[-1], *tail[0].kinds)
        return Layout((*result, *(part.kinds for part in tail[1:])))


def _filled(loads: list[int], layers: int) -> list[int]:
    """Layers that each stage gets in addition to its load, so that the fullest has the least.

    Of equal stages the plain ones are filled first, from the last one on, then those of the embedding and of
    the MTP layers or the loss.
    """
    ends = 0, len(loads) - 1
    order = sorted(range(len(loads)), key=lambda stage: (stage in ends, -stage))
    low, high = min(loads), max(loads) + layers
    while low < high:  # the highest level below which all layers find a place
        level = (low + high + 1) // 2
        if sum(max(0, level - load) for load in loads) <= layers:
            low = level
        else:
            high = level - 1
    counts = [max(0, low - load) for load in loads]
    rest = layers - sum(counts)
    for stage in [stage for stage in order if loads[stage] <= low][:rest]:
        counts[stage] += 1
    return counts
