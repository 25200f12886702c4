"""Skips: values that one layer makes for a later one, past the layers between, which know nothing of them.

A ``Skip`` is held by the modules that save and load it, so that who makes and who uses it is known without
running anything, and the same layers run without a pipeline: there the value simply waits in the ``Skip``.
In a pipeline it waits in none: a layer takes what it loads with its input and gives what it saves with its
output (``Carried``), so that messages and recomputation treat skips as they treat inputs and outputs.

Invariant: what is computed does not depend on the cut. A value that is changed in place after it was saved,
and one that is not there when it is loaded, are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.carry import NOTHING, Carry
from counterflow.errors import ConfigError
from counterflow.schedule.workload import SkipLink
from counterflow.torch_private import in_backward

from ..messages.values import Value
from .features import Feature, Run
from .named_layer import NamedLayer, place_of
from .randomness import SampleRows, versions

_NOTHING = object()


class Skip:
    """A value that one layer saves and later layers load, whatever their stages.

    ``skip.saver()`` is a module that returns its input and saves it; ``skip.loader()`` is a module that
    returns (its input, the value) or, called without arguments, the value. Both are layers of the model or
    parts of layers, which call them in their forward. A value is anything that stages may pass on.

    Args:
        name: name for messages.
        once: whether the value has no gradient and is equal in all micro-batches of a step (a mask, a rotary
            table): it is sent once a step. Any other value is refused then.

    >>> skip = Skip("entry")
    >>> model = nn.Sequential(skip.saver(), nn.ReLU(), skip.loader())
    >>> model(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]), tensor([-1.,  2.]))
    """

    def __init__(self, name: str, *, once: bool = False) -> None:
        _keep_out_of_compiled_code()
        self.name = name
        self.once = once
        self._empty()
        self._runs = False
        self._with_graph = True

    def saver(self) -> SaveSkip:
        """A module that saves its input and returns it."""
        return SaveSkip(self)

    def loader(self) -> LoadSkip:
        """A module that returns its input together with the value."""
        return LoadSkip(self)

    def __repr__(self) -> str:
        return f"Skip({self.name!r}{', once=True' if self.once else ''})"

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin without a value."""
        return {"name": self.name, "once": self.once}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # -- for the modules

    def _empty(self) -> None:
        self._value: Any = _NOTHING
        self._versions: list[int] = []

    def _put(self, value: Any) -> None:
        if self._is_again():
            if not self._with_graph:
                raise ConfigError(
                    f"the skip {self.name!r} was saved without a graph and again in the backward, as a "
                    "reentrant torch.utils.checkpoint does, which cuts its gradient; save it outside of that"
                )
            return
        if self.once and any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(value)):
            raise ConfigError(
                f"the skip {self.name!r} has once=True and a gradient, which would be that of one micro-"
                "batch only; detach what is saved, or leave out once=True"
            )
        self._with_graph = torch.is_grad_enabled()
        self._value, self._versions = value, versions(value)

    def _get(self) -> Any:
        if self._is_again():
            raise ConfigError(
                f"the skip {self.name!r} is loaded in a torch.utils.checkpoint, which would load it again in "
                "the backward, when another micro-batch's may be there; load it before, and pass it in"
            )
        if self._value is _NOTHING:
            raise ConfigError(
                f"the skip {self.name!r} is loaded before it was saved; save it before in the same layer, or "
                "in an earlier one"
            )
        self._check()
        return self._value

    def _check(self) -> None:
        if versions(self._value) != self._versions:
            raise ConfigError(
                f"the skip {self.name!r} was changed in place after it was saved; save a copy, or let the "
                "layer that changes it make a new tensor"
            )

    def _is_again(self) -> bool:
        """Whether a user's checkpoint computes again, in the backward."""
        return not self._runs and in_backward()


class SaveSkip(nn.Module):
    """A layer that returns its input and saves it; made by ``Skip.saver``."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, value: Any) -> Any:
        """Return the input, and save it."""
        self.skip._put(value)  # noqa: SLF001 - it is the skip's other half
        return value

    def extra_repr(self) -> str:
        """Its name."""
        return repr(self.skip.name)


class LoadSkip(nn.Module):
    """A layer that returns its input and a skip's value, or the value alone; made by ``Skip.loader``."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, value: Any = _NOTHING) -> Any:
        """(``value``, what was saved), or without ``value`` what was saved."""
        found = self.skip._get()  # noqa: SLF001 - it is the skip's other half
        return found if value is _NOTHING else (value, found)

    def extra_repr(self) -> str:
        """Its name."""
        return repr(self.skip.name)


@functools.cache
def _keep_out_of_compiled_code() -> None:
    """``torch.compile`` leaves saving and loading alone; said with the first skip, as it takes seconds."""
    for kind in (SaveSkip, LoadSkip):
        kind.forward = torch.compiler.disable(kind.forward)  # type: ignore[method-assign]


class Carried(NamedTuple):
    """What a layer or stage takes or gives, and the skips beside it by their number."""

    value: Any
    skips: dict[int, Any]


# -- where a model's skips lead


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
        """What later stages take, or the next slice."""
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
    found: list[StageSkips | None] = []
    for stage in range(len(edges) - 1):
        mine = by_layer[edges[stage] : edges[stage + 1]]
        every = sorted(links.items())
        takes = tuple((link, tuple(numbers)) for link, numbers in every if link.target == stage)
        gives = tuple((link, tuple(numbers)) for link, numbers in every if link.source == stage)
        carries = tuple(number for layer in mine for number in layer.carries)
        its = StageSkips(tuple(mine), takes, gives, tuple(following.get(stage, ())), carries)
        of_layers = any(layer.inner or layer.carries for layer in mine)
        has_any = takes or gives or its.next or following.get(stage - 1) or of_layers
        found.append(its if has_any else None)
    return found


def links_of(stages: Iterable[StageSkips | None]) -> tuple[SkipLink, ...]:
    """What goes from stages to others than the next one."""
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
        keys = [id(skip) for skip in _skips_in(layer)]
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
    """Numbers of each layer's carried states, from ``first`` on."""
    holders: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for index, layer in enumerate(layers):
        its = carries_in(layer)
        for carry in its:
            if holders.setdefault(id(carry), index) != index:
                raise ConfigError(
                    f"{places[holders[id(carry)]]} and {places[index]} hold the same cf.Carry; make one for "
                    "each, as each layer leaves a state of its own"
                )
        found.append(tuple(range(first, first + len(its))))
        first += len(its)
    return found


def carries_in(layer: nn.Module) -> list[Carry]:
    """A layer's carried states, each once, in the order of its modules."""
    return [module for module in layer.modules() if isinstance(module, Carry)]


def _skips_in(layer: nn.Module) -> list[Skip]:
    """A layer's skips, each once, in the order of its modules."""
    found = [m.skip for m in layer.modules() if isinstance(m, (SaveSkip, LoadSkip))]
    return list({id(skip): skip for skip in found}.values())


# -- running


class PassBy(Feature):
    """Takes past a stage's layers what they neither load nor carry; it is around their recomputation.

    So a layer that is computed again holds no state that an earlier one left to the next slice.

    Args:
        plan: the stage's skips.
        layers: its layers as they are on this worker.
    """

    why_apart = "layers of its stage have skips, or states of slices"

    def __init__(self, plan: StageSkips, layers: Sequence[NamedLayer]) -> None:
        self._of_layer: dict[int, tuple[set[int], set[int], set[int]]] = {}
        needed = plan.handed_on
        for layer, its in reversed(list(zip(layers, plan.layers, strict=True))):
            self._of_layer[layer.index] = {*its.loads, *its.carries}, needed - {*its.carries}, set(needed)
            needed |= {*its.loads}

    def around_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """See ``Feature``: the output has all that later layers and stages, and the next slice need.

        Raises:
            ConfigError: the layer changes in place what others saved.
        """
        takes, passing, needed = self._of_layer[layer.index]
        value, held = value
        before = versions(held)
        output, made = run(Carried(value, {n: v for n, v in held.items() if n in takes}), step, rows)
        if versions(held) != before:
            raise ConfigError(
                f"{place_of(layer)} changes in place what was saved in a skip before, or what another slice "
                "left in a cf.Carry; save a copy, or let the layer make a new tensor"
            )
        past = {n: v for n, v in held.items() if n in passing}
        return Carried(output, past | {n: v for n, v in made.items() if n in needed})


class SkipRunner(Feature):
    """Runs a stage's layers with what they save and load.

    Args:
        plan: the stage's skips.
        layers: its layers as they are on this worker.
        by_layer: whether the layers are computed again one by one, so that graphs save nothing.
    """

    why_apart = "layers of its stage have skips, or states of slices"

    def __init__(self, plan: StageSkips, layers: Sequence[NamedLayer], *, by_layer: bool = False) -> None:
        self._gives, self._leaves = bool(plan.gives or plan.next), bool(plan.carries)
        self._by_layer = by_layer
        self._of_layer: dict[int, tuple[LayerSkips, dict[int, Skip], list[Skip]]] = {}
        self._carries: dict[int, list[tuple[int, Carry]]] = {}
        for layer, its in zip(layers, plan.layers, strict=True):
            skips = _skips_in(layer.module)
            numbered = {n: s for n, s in zip(its.inner, skips, strict=True) if n is not None}
            self._of_layer[layer.index] = its, numbered, skips
            its_carries = carries_in(layer.module) if its.carries else ()
            self._carries[layer.index] = list(zip(its.carries, its_carries, strict=True))

    def around_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """See ``Feature``."""
        found = run(value if type(value) is Carried else Carried(value, {}), step, rows)
        return found if self._gives or (self._leaves and rows.slices > 1) else found.value

    def around_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """See ``Feature``: the layer is given what it loads, and its output has what it makes for others.

        Raises:
            ConfigError: it does not save what it has to.
        """
        its, numbered, skips = self._of_layer[layer.index]
        carries = self._carries[layer.index] if rows.slices > 1 else ()
        value, held = value
        for skip in skips:
            skip._empty()  # noqa: SLF001 - what a plain run left
            skip._runs = True  # noqa: SLF001
        try:
            for number in its.loads:
                numbered[number]._put(held[number])  # noqa: SLF001
            for number, carry in carries:
                carry.begin(held.get(number, NOTHING))
            output = run(value, step, rows)
            made = {number: self._made(layer.index, numbered[number]) for number in its.saves}
            left = {number: carry.end() for number, carry in carries}
            if any(state is NOTHING for state in left.values()):
                raise ConfigError(
                    f"{place_of(layer)} left nothing in a cf.Carry that it holds; call its leave() in each "
                    "forward, with None if the next slice needs nothing"
                )
            if rows.slice == rows.slices - 1:
                left = {}  # nobody takes it
            if left and (self._by_layer or not torch.is_grad_enabled()):
                left = _compact(left)
        finally:
            for skip in skips:
                skip._empty()  # noqa: SLF001
                skip._runs = False  # noqa: SLF001
            for _, carry in carries:
                carry.end()
        return Carried(output, made | left)

    def _made(self, index: int, skip: Skip) -> Any:
        if skip._value is _NOTHING:  # noqa: SLF001
            raise ConfigError(f"layer {index} did not save the skip {skip.name!r} in its forward")
        skip._check()  # noqa: SLF001
        return skip._value  # noqa: SLF001


def _compact(left: dict[int, Any]) -> dict[int, Any]:
    """States that hold no other memory: keys and values may be views of one tensor with the queries.

    Where a graph saves that tensor, nothing is gained, and states stay as they are.
    """
    sizes: dict[int, int] = {}
    views = {id(leaf): leaf for leaf in pytree.tree_leaves(left) if type(leaf) is Tensor}
    for view in views.values():
        pointer = view.untyped_storage().data_ptr()
        sizes[pointer] = sizes.get(pointer, 0) + view.nbytes
    copies = {
        key: view.clone(memory_format=torch.contiguous_format)
        for key, view in views.items()
        if sizes[view.untyped_storage().data_ptr()] < view.untyped_storage().nbytes()
    }
    found: dict[int, Any] = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), left)
    return found
