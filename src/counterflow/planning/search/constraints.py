"""Constraints on a plan. Flags, a config's keys and the page of ``explore`` are made from these fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from counterflow.common.cli_fields import cli_field
from counterflow.common.parallel_degrees import Degrees, text_of
from counterflow.errors import ConfigError
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.layouts import Layout
from counterflow.schedule.modes import Recompute, Sync, parse_mode
from counterflow.schedule.scheme import Scheme

from ..cost.device_placement import Arrangement
from ..cost.stages import Cuts, Cutting
from ..inputs.cluster import Cluster
from ..inputs.model import Model
from .shape import Options


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on a plan; None means no constraint, and a value alone is one of one value.

    Attributes:
        schemes: only these.
        stale: also asynchronous schemes, which use old weights; those that ``schemes`` names are always
            tried. On one worker they are never tried, because they gain nothing.
        depths: only these numbers of workers.
        samples: only these micro-batches, in samples; they need not be powers of two.
        more_samples: these in addition to the powers of two.
        recompute: only these.
        sync: only these.
        arrangements: only these.
        cuts: how layers are cut; even cuts are tried in addition to balanced ones.
        zero_stages: only these, if a stage has several holders; otherwise they do not differ.
        options: (name, values) pairs: only these values of the option, for schemes that have it;
            ``scheme.name``: for that scheme alone, instead of the pair for all. A value that is not tried
            leaves no candidate.
        more_updates: for schemes that update after each micro-batch, also several updates in a mini-batch.
        tensor_parallel: degrees of tensor parallelism; each divides the devices of a node.
        slices: only these numbers of slices of a micro-batch's sequence; 1: it is whole.
        contexts: degrees of context parallelism.
        experts: degrees of expert parallelism; None: all powers of two that divide the experts and fit the
            cluster, if the profile has experts.
        shards: positions with samples of their own that shard weights; None: as many as experts need.

    Raises:
        ConfigError: a value is not legal, whatever the model and the cluster.

    >>> limits = Constraints(depths=4, recompute="layer", options={"pairs": 1})
    >>> limits.depths, limits.recompute, limits.options
    ((4,), (<Recompute.LAYER: 'layer'>,), (('pairs', (1,)),))
    """

    schemes: tuple[str, ...] | None = cli_field(
        None, "Only this scheme.", list[str], metavar="NAME", name="scheme"
    )
    stale: bool = cli_field(False, "Also try asynchronous schemes, which use old weights.", bool)
    depths: tuple[int, ...] | None = cli_field(
        None, "Only this many workers per replica.", list[int], metavar="D", name="workers"
    )
    samples: tuple[int, ...] | None = cli_field(
        None,
        "Only micro-batches of this many samples.",
        list[int],
        metavar="SAMPLES",
        name="micro_batch_size",
    )
    more_samples: tuple[int, ...] = cli_field(
        (),
        "Also try this size, in addition to powers of two.",
        list[int],
        metavar="SAMPLES",
        name="also_micro_batch_size",
    )
    recompute: tuple[Recompute, ...] = cli_field(
        tuple(Recompute), "Only none, stage or layer.", list[Recompute], metavar="MODE"
    )
    sync: tuple[Sync, ...] = cli_field(
        tuple(Sync), "Only end, eager or eager-opt.", list[Sync], metavar="MODE", name="sync_mode"
    )
    arrangements: tuple[Arrangement, ...] = cli_field(
        tuple(Arrangement),
        "Only this arrangement of workers on nodes: pipeline-inside (the workers of a replica), "
        "replicas-inside (the replicas of a worker) or copies-inside (all copies of a stage).",
        list[str],
        metavar="NAME",
        name="arrangement",
    )
    zero_stages: tuple[int, ...] = cli_field(
        (0, 1),
        "Only this ZeRO stage. 0: every holder of a weight has its optimiser state; 1: one holder has it, "
        "updates the weight and sends it to the others.",
        list[int],
        metavar="STAGE",
        name="zero_stage",
    )
    options: tuple[tuple[str, tuple[OptionValue, ...]], ...] = cli_field(
        (),
        "Only this value of a scheme's option: of all schemes that have it (pairs=1), or of one "
        "(chimera.pairs=1); see 'counterflow schemes'.",
        list[str],
        metavar="NAME=VALUE",
        name="option",
    )
    tensor_parallel: tuple[int, ...] = cli_field(
        (1,),
        "Tensor parallelism: T devices of a node share the work of every layer. Default 1.",
        list[int],
        metavar="T",
    )
    contexts: tuple[int, ...] = cli_field(
        (1,),
        "Context parallelism: C devices share each sequence. Default 1.",
        list[int],
        metavar="C",
    )
    experts: tuple[int, ...] | None = cli_field(
        None,
        "Only this degree of expert parallelism: E devices share the experts of each layer. Default: 1, 2, 4 "
        "and so on where the profile has experts.",
        list[int],
        metavar="E",
    )
    shards: tuple[int, ...] | None = cli_field(
        None,
        "Only this many devices with samples of their own that shard a worker's weights (dp_shard). Default: "
        "as many as the degree of experts needs.",
        list[int],
        metavar="S",
    )
    cuts: Cuts = cli_field(
        Cutting.BALANCED,
        "How layers are cut into stages: balanced (the default): by cost, or evenly if that is faster; even: "
        "equally many blocks each; "
        "the first layer of each stage but the first; or a layout of Megatron-LM (Et*3|(tt|)*5,L).",
        metavar="RULE",
    )
    slices: tuple[int, ...] | None = cli_field(
        None,
        "Only this many slices of a micro-batch's sequence. Default: 1, and 2, 4 and 8 where the profile "
        "knows what slices cost.",
        list[int],
        metavar="NUMBER",
    )
    more_updates: bool = cli_field(
        False,
        "Also try several updates in a mini-batch, for schemes that update after every micro-batch.",
        bool,
    )
    recut: bool = cli_field(
        False,
        "Also move single layers between neighbouring stages of the best plans, while a step gets faster.",
        bool,
    )

    def __post_init__(self) -> None:
        for name in (*_NUMBERS, *_MODES, "schemes"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _legal(name, values))
        for name in ("stale", "more_updates", "recut"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")
        object.__setattr__(self, "options", _options(self.options))
        object.__setattr__(self, "cuts", _cuts(self.cuts))
        if self.recut and self.cuts is not Cutting.BALANCED:
            raise ConfigError("recut: cannot be combined with cuts, which are fixed; omit one of them")

    def at(self, degrees: Degrees, tried: Collection[Degrees], cluster: Cluster) -> Constraints:
        """The constraints for some degrees, without depths that only others allow.

        Args:
            degrees: degrees of a worker's positions.
            tried: all degrees that are tried.
            cluster: the devices.

        Raises:
            ConfigError: optimiser state shall be sharded, which cannot be combined with several positions.
        """
        stages = self.zero_stages if degrees.positions == 1 else (0,)
        if 0 in stages and 0 not in self.zero_stages:
            raise ConfigError(
                f"{text_of(degrees)}: cannot be combined with zero_stage=1; give only one of them"
            )
        if self.depths is None or len(tried) == 1:
            return replace(self, zero_stages=stages)
        legal = {
            of: [d for d in self.depths if d > 0 and not cluster.size // of.positions % d] for of in tried
        }
        of_none = {*self.depths}.difference(*legal.values())
        return replace(self, depths=(*legal[degrees], *of_none), zero_stages=stages)

    def slices_at(self, degrees: Degrees) -> tuple[int, ...] | None:
        """Numbers of slices to try with some degrees; plans with sharded weights have whole sequences.

        Raises:
            ConfigError: only slices are wanted, but weights are sharded.
        """
        if degrees.shards == 1:
            return self.slices
        if self.slices is not None and 1 not in self.slices:
            raise ConfigError(
                f"slices={self.slices[0]}: plans with {text_of(degrees)} have whole sequences; give "
                "slices=1, or omit one of them"
            )
        return (1,)

    def of_scheme(self, scheme: Scheme) -> dict[str, tuple[OptionValue, ...]]:
        """The accepted values of a scheme's options.

        >>> from counterflow.schedule import registry
        >>> limits = Constraints(options=(("micro_batches", (8,)), ("chimera.micro_batches", (4, 8))))
        >>> [limits.of_scheme(registry.scheme(name)) for name in ("dapple", "chimera")]
        [{'micro_batches': (8,)}, {'micro_batches': (4, 8)}]
        """
        options = dict(self.options)
        names = [option.name for option in scheme.options]
        accepted = {name: options.get(f"{scheme.name}.{name}", options.get(name)) for name in names}
        return {name: values for name, values in accepted.items() if values is not None}

    def allows(self, scheme: Scheme, options: Options) -> bool:
        """True if these options of a scheme have only accepted values.

        >>> from counterflow.schedule import registry
        >>> limits, chimera = Constraints(options=(("pairs", (1,)),)), registry.scheme("chimera")
        >>> [limits.allows(chimera, (("stages", 8), *more)) for more in ([("pairs", 1)], [("pairs", 2)], [])]
        [True, False, True]
        """
        return all(
            value_of(scheme, name, options) in values for name, values in self.of_scheme(scheme).items()
        )


_MODES = {"recompute": Recompute, "sync": Sync, "arrangements": Arrangement}
_NUMBERS = (
    "depths",
    "samples",
    "more_samples",
    "zero_stages",
    "tensor_parallel",
    "contexts",
    "experts",
    "shards",
    "slices",
)
_SOME = (*_MODES, "zero_stages", "tensor_parallel", "contexts")
"""Constraints without which nothing is tried if they are empty."""


def _legal(name: str, limit: Any) -> tuple[Any, ...]:
    values = _several(limit)
    if name in _SOME and not values:
        raise ConfigError(f"{name}={values}: must have one value or more")
    if name in _MODES:
        return tuple(parse_mode(_MODES[name], name.removesuffix("s"), value) for value in values)
    if name in _NUMBERS:
        return tuple(_number(name, value) for value in values)
    for value in values:
        if not isinstance(value, str):
            raise ConfigError(f"{name}: {value!r} is not the name of a scheme")
    return values


def _several(values: Any) -> tuple[Any, ...]:
    alone = isinstance(values, str) or not isinstance(values, Iterable)
    return (values,) if alone else tuple(values)


def _number(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name}: {value!r} is not a whole number")


def _options(options: Any) -> tuple[tuple[str, tuple[OptionValue, ...]], ...]:
    try:
        pairs = [*(options.items() if isinstance(options, Mapping) else options)]
        read = tuple((name, _several(values)) for name, values in pairs)
    except (TypeError, ValueError):
        read = ((0, ()),)
    if not all(isinstance(name, str) for name, _ in read):
        raise ConfigError(
            f"options={options!r}: must be pairs of an option's name and its values, as in "
            '(("pairs", (1, 2)),), or a dict of these'
        )
    return read


def _cuts(cuts: Any) -> Cuts:
    if isinstance(cuts, str):
        return parse_mode(Cutting, "cuts", cuts)
    try:
        return tuple(map(index, cuts))
    except TypeError:
        raise ConfigError(
            f"cuts={cuts!r}: must be {' or '.join(Cutting)}, or the layers at which stages begin after the "
            "first, as in (13, 25, 37)"
        ) from None


def cuts_of(text: str, model: Model) -> Cuts:
    """Parse a rule for cuts: its name, the layers at which stages begin, with commas, or a layout.

    Raises:
        ConfigError: the text is something else, or the layout of another model.

    >>> model = Model("tiny", ("embedding", *["block"] * 4, "head"))
    >>> cuts_of("even", model).value, cuts_of("2,4", model), cuts_of("Et|tt|tL", model)
    ('even', (2, 4), (2, 4))
    """
    if text in tuple(Cutting):
        return Cutting(text)
    if text.strip().startswith("E") or "|" in text:
        return Layout.read(text).cuts(len(model.layers), mtp=model.mtp)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"cuts={text}: must be {' or '.join(Cutting)}, or the layers at which stages begin after the "
            "first, as in 13,25,37, or a layout of Megatron-LM, as in Et*3|(tt|)*5,L"
        ) from None


def value_of(scheme: Scheme, name: str, options: Options) -> OptionValue | None:
    """The value of a scheme's option, or its default."""
    values = dict(options)
    option = scheme.option(name)
    if name in values or option is None:
        return values.get(name)
    return option.default if option.like is None else values.get(option.like)
