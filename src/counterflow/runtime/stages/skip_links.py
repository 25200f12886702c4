"""Skip connections of a model: which layer saves for which, and which values cross which stages.

Invariant: who makes and who uses a skip is known without running anything, from the modules that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from counterflow.api.skip import LoadSkip, SaveSkip, Skip
from counterflow.errors import ConfigError
from counterflow.schedule.workload import SkipLink

from .carrying import carries_in


@dataclass(frozen=True, slots=True)
class LayerSkips:
    """The skips of a layer that it shares with others, by number.

    Attributes:
        saves: skips that it saves for later layers.
        loads: skips that it loads from earlier layers.
        inner: all its skips, in the order of its modules; None for skips of this layer alone.
        carries: its carried states, in the order of its modules, numbered among the skips.
    """

    saves: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    inner: tuple[int | None, ...] = ()
    carries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StageSkips:
    """The skips of a stage.

    Attributes:
        layers: of its layers.
        takes: what comes by each link, ascending.
        gives: what goes by each link, ascending.
        next: what goes to the next stage, with the output.
        carries: what goes to its own run of the next slice.
    """

    layers: tuple[LayerSkips, ...]
    takes: tuple[tuple[SkipLink, tuple[int, ...]], ...]
    gives: tuple[tuple[SkipLink, tuple[int, ...]], ...]
    next: tuple[int, ...]
    carries: tuple[int, ...] = ()

    @property
    def handed_on(self) -> set[int]:
        """Values for later stages, or for the next slice."""
        by_links = {number for _, numbers in self.gives for number in numbers}
        return by_links | {*self.next, *self.carries}


def stage_skips(
    layers: Sequence[nn.Module], edges: Sequence[int], *, sliced: bool = False
) -> list[StageSkips | None]:
    """The skips of each stage; None for stages that none begins, ends or is within.

    Args:
        layers: of the model.
        edges: the number of the first layer of each stage, and the number of layers.
        sliced: whether micro-batches are cut into slices; carried states matter to these only.

    Raises:
        ConfigError: a skip is saved by several layers, never, or only after it is loaded; or never loaded.
    """
    saved, loaded, by_layer = _read(layers, sliced=sliced)
    stage_of = [stage for stage in range(len(edges) - 1) for _ in range(edges[stage], edges[stage + 1])]
    links: dict[SkipLink, list[int]] = {}
    following: dict[int, list[int]] = {}
    for number, (skip, maker) in saved.items():
        source = stage_of[maker]
        for target in sorted({stage_of[user] for user in loaded[number]} - {source}):
            if target > source + 1 or skip.once:
                links.setdefault(SkipLink(source, target, skip.once), []).append(number)
            else:
                following.setdefault(source, []).append(number)
    of_stages: list[StageSkips | None] = []
    for stage in range(len(edges) - 1):
        layers_here = by_layer[edges[stage] : edges[stage + 1]]
        all_links = sorted(links.items())
        takes = tuple((link, tuple(numbers)) for link, numbers in all_links if link.target == stage)
        gives = tuple((link, tuple(numbers)) for link, numbers in all_links if link.source == stage)
        carries = tuple(number for layer in layers_here for number in layer.carries)
        skips_here = StageSkips(tuple(layers_here), takes, gives, tuple(following.get(stage, ())), carries)
        of_layers = any(layer.inner or layer.carries for layer in layers_here)
        has_any = takes or gives or skips_here.next or following.get(stage - 1) or of_layers
        of_stages.append(skips_here if has_any else None)
    return of_stages


def links_of(stages: Iterable[StageSkips | None]) -> tuple[SkipLink, ...]:
    """Links from stages to others than the next one."""
    return tuple(sorted(link for stage in stages if stage is not None for link, _ in stage.gives))


def _read(
    layers: Sequence[nn.Module], *, sliced: bool
) -> tuple[dict[int, tuple[Skip, int]], dict[int, list[int]], list[LayerSkips]]:
    """Each skip by number with its saving layer, its loading layers, and the skips of each layer.

    Only skips that several layers share count.
    """
    places = [f"layer {index} ({type(layer).__name__})" for index, layer in enumerate(layers)]
    skips: dict[int, Skip] = {}
    makers: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(module, (SaveSkip, LoadSkip)):
                skips[id(module.skip)] = module.skip
                kind = makers if isinstance(module, SaveSkip) else users
                kind.setdefault(id(module.skip), []).append(index)
    for key, skip in skips.items():
        saving, loading = makers.get(key, []), users.get(key, [])
        if not saving:
            raise ConfigError(f"{places[loading[0]]} loads the skip {skip.name!r}, which no layer saves")
        if not loading:
            raise ConfigError(
                f"{places[saving[0]]} saves the skip {skip.name!r}, which no layer loads; leave it out"
            )
        if len(saving) > 1:
            several = " and ".join(places[index] for index in saving)
            raise ConfigError(f"{several} save the skip {skip.name!r}; make a Skip for each")
        if loading[0] < saving[0]:
            raise ConfigError(
                f"{places[loading[0]]} loads the skip {skip.name!r}, which {places[saving[0]]} saves later; "
                "a skip leads to later layers"
            )
    shared = {key: number for number, key in enumerate(k for k in skips if {*users[k]} != {*makers[k]})}
    saved = {number: (skips[key], makers[key][0]) for key, number in shared.items()}
    loaded = {number: users[key] for key, number in shared.items()}
    by_layer = []
    carries = _numbered_carries(layers, places, first=len(shared))
    for index, layer in enumerate(layers):
        keys = [id(skip) for skip in skips_in(layer)]
        by_layer.append(
            LayerSkips(
                saves=tuple(shared[key] for key in keys if key in shared and makers[key] == [index]),
                loads=tuple(shared[key] for key in keys if key in shared and makers[key] != [index]),
                inner=tuple(shared.get(key) for key in keys),
                carries=carries[index] if sliced else (),
            )
        )
    return saved, loaded, by_layer


def _numbered_carries(
    layers: Sequence[nn.Module], places: Sequence[str], *, first: int
) -> list[tuple[int, ...]]:
    holders: dict[int, int] = {}
    numbers: list[tuple[int, ...]] = []
    for index, layer in enumerate(layers):
        carries = carries_in(layer)
        for carry in carries:
            if holders.setdefault(id(carry), index) != index:
                raise ConfigError(
                    f"{places[holders[id(carry)]]} and {places[index]} hold the same cf.Carry; make one for "
                    "each, as each layer leaves a state of its own"
                )
        numbers.append(tuple(range(first, first + len(carries))))
        first += len(carries)
    return numbers


def skips_in(layer: nn.Module) -> list[Skip]:
    """A layer's skips, each once, in the order of its modules."""
    skips = [m.skip for m in layer.modules() if isinstance(m, (SaveSkip, LoadSkip))]
    return list({id(skip): skip for skip in skips}.values())
