"""Groups of options, and the flags that several commands share.

A command takes a group as one parameter; ``with_flags`` unfolds it into the group's flags. A command's own
options are the fields of an ``OptionRecord``. Shared options of schemes are made from the schemes' records,
options of costs from the fields of ``Costs`` and ``ByteCosts``. For both, None means that a flag was not
given, so defaults stand in the library alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import typer

from counterflow.common.cli_fields import CliField, cli_fields
from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.placement import Placement
from counterflow.schedule.scheme import SPLIT, Option, OptionType
from counterflow.simulation import ByteCosts, Costs, cost_texts
from counterflow.simulation.model_share import CostsOf, of_stages

from .wording import flag

ENDS_PROCESS = "the process ends with the command"
"""Object of a command's context if nothing else runs in the process after it."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead.", rich_help_panel="Output")
]


def schemes_from(begun: str) -> list[str]:
    """Names of schemes with this beginning, for completion in a shell."""
    return [name for name in registry.SCHEMES if name.startswith(begun)]


ConfigArgument = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.toml", help="Config of the training. Default: the built-in example."),
]

WorkersOption = Annotated[int | None, typer.Option(help="Workers of one pipeline group.")]

SchemeOption = Annotated[
    str | None,
    typer.Option(help="Name of the scheme; 'counterflow schemes' lists them.", autocompletion=schemes_from),
]


SubjectArgument = Annotated[
    str,
    typer.Argument(
        autocompletion=schemes_from,
        metavar="SCHEME|FILE",
        help="A scheme (see 'counterflow schemes') or a schedule file (see 'counterflow export').",
        show_default=False,
    ),
]


def _option(panel: str, help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False)


_SCHEME = "Scheme: 'counterflow schemes' lists what each accepts"

_SIZES = {
    "stages": "D: stages of each pipe. Every scheme accepts --stages or --workers.",
    "workers": "P: workers of the pipeline group, in place of --stages.",
    "micro_batches": "N: micro-batches of a mini-batch; of pipedream-2bw and wpipe, between updates.",
}
"""Descriptions of the options that all schemes have."""

_COSTS = "Costs: one number for all stages (1.5), or one a stage (1,1,1.5,2)"
_MEMORY = "Memory: bytes of one stage (300MB, 1.5GiB), or one a stage (1GiB,2GiB)"
_MODEL_COSTS = "Costs of a worker's share of the model, or, with --costs-of model, of the whole model"
_MODEL_MEMORY = "Memory of the same share (300MB, 1.5GiB)"


class OptionGroup:
    """Options that a command accepts as one parameter."""

    __slots__ = ()

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """Every option as a parameter of its own, annotated for typer."""
        raise NotImplementedError

    @classmethod
    def pop_from(cls, values: dict[str, Any]) -> Self:
        """Remove the group's options from ``values`` and return them as a group."""
        raise NotImplementedError


class OptionRecord(OptionGroup):
    """A dataclass whose fields, made with ``asked``, are a command's own options, with their own defaults."""

    __slots__ = ()
    panel: ClassVar[str]
    """The heading above the options in the help."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """All flags as parameters."""
        kinds = get_type_hints(cls)
        return [_own_flag(field, kinds[field.field], cls.panel) for field in cli_fields(cls).values()]

    @classmethod
    def pop_from(cls, values: dict[str, Any]) -> Self:
        """Remove the record's options from ``values`` and return them as a record."""
        return cls(**{field.field: values.pop(name) for name, field in cli_fields(cls).items()})


def _own_flag(field: CliField, kind: Any, panel: str) -> inspect.Parameter:
    about, has_default = field.spec, field.default is not MISSING
    option = typer.Option(
        *_names(field),
        help=about.about,
        metavar=about.metavar,
        min=about.least,
        max=about.most,
        rich_help_panel=panel,
        show_default=has_default,
    )
    default = field.default if has_default else inspect.Parameter.empty
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


@dataclass(frozen=True)
class Flags(OptionGroup):
    """A group of flags as they were given, by name; None if not given."""

    values: Mapping[str, Any]

    @classmethod
    def flags(cls) -> dict[str, Any]:
        """Every flag, annotated for typer."""
        raise NotImplementedError

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """All flags as parameters."""
        return [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in cls.flags().items()
        ]

    @classmethod
    def pop_from(cls, values: dict[str, Any]) -> Self:
        """Remove the group's options from ``values`` and return them as a group."""
        return cls({name: values.pop(name) for name in cls.flags()})


class SchemeOptions(Flags):
    """Options of schemes, as they were given."""

    @classmethod
    def flags(cls) -> dict[str, Any]:
        """Every option of every scheme, annotated for typer."""
        return {name: _scheme_flag(name, known) for name, known in registry.options().items()}

    def set_values(self) -> dict[str, OptionValue]:
        """The options that were given, by their Python names."""
        return {name: plain_value(value) for name, value in self.values.items() if value is not None}


def _scheme_flag(name: str, known: Mapping[str, Option]) -> Any:
    option = next(iter(known.values()))
    about, names, metavar = _SIZES.get(name) or _sentence(registry.about(known)), (flag(name),), None
    kind: Any = int
    if option.kind is OptionType.FLAG:
        kind, names = bool, (f"{flag(name)}/--no-{flag(name)[2:]}",)
    elif option.kind is OptionType.WORD:
        kind, metavar = Enum(name, {word: word for word in option.words}, module=__name__), "MODE"
        about += f" One of {', '.join(option.words)}."
    elif option.words:
        kind, metavar = str, "|".join([option.letter or "NUMBER", *option.words])
    elif option.lengths:
        kind, metavar = str, "NUMBER|LENGTHS"
    return Annotated[kind | None, _option(_SCHEME, about, *names, metavar=metavar)]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def cli_flag(field: CliField, panel: str) -> Any:
    """The flag of a field that people may give; its value is None if it was not given."""
    about = field.spec
    return Annotated[about.kind | None, _option(panel, about.about, *_names(field), metavar=about.metavar)]


def _names(field: CliField) -> tuple[str, ...]:
    name = flag(field.name)
    return (f"{name}/--no-{name[2:]}" if field.default is True else name,)


def plain_value(value: Any) -> OptionValue:
    """An option's value as schemes accept it; a number is passed as text if the option also accepts words."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    text: OptionValue = value
    return text


_UNITS = "one stage, a worker's share of the model, or the whole model (stage, worker, model)."

OF_SPLIT_BACKWARDS = ("input_gradient", "weight_gradient", "kept_for_weights")
"""Costs that apply to split backwards only."""


class CostOptions(Flags):
    """Costs of ops, messages and memory, as given in flags."""

    unit: ClassVar[CostsOf] = CostsOf.STAGE
    panels: ClassVar[Mapping[type, str]] = {Costs: _COSTS, ByteCosts: _MEMORY}

    @classmethod
    def flags(cls) -> dict[str, Any]:
        """Every cost, annotated for typer."""
        about = f"What costs are given for: {_UNITS} Default {cls.unit}."
        costs_of = Annotated[CostsOf | None, _option(cls.panels[Costs], about, "--costs-of", metavar="UNIT")]
        costs = {name: cli_flag(field, cls.panels[field.record]) for name, field in cost_texts.COSTS.items()}
        return {**costs, "costs_of": costs_of}

    @property
    def costs_of(self) -> CostsOf:
        """The unit that costs are given for."""
        unit: CostsOf | None = self.values["costs_of"]
        return self.unit if unit is None else unit

    def set_values(self) -> dict[str, Any]:
        """The costs that were given, parsed, by the names of their flags."""
        values = {n: v for n, v in self.values.items() if v is not None and n != "costs_of"}
        return cost_texts.read(values, _in_flag)

    def but(self, overrides: CostOptions) -> CostOptions:
        """The same costs, overridden by those that ``other`` contains."""
        replaced = {name: value for name, value in overrides.values.items() if value is not None}
        return CostOptions({**self.values, **replaced})

    def costs(self) -> Costs:
        """The costs as they were given.

        Raises:
            ConfigError: a cost is not a number, or negative.
        """
        return cost_texts.costs_from(self.set_values())

    def of_stages(self, placement: Placement) -> Costs:
        """Costs of the stages of this placement, as the simulator needs them.

        Raises:
            ConfigError: as in ``costs``, or there is one cost per stage although costs are given for another
                unit.
        """
        return of_stages(self.costs(), placement, self.costs_of)

    def without_effect(self, *schedules: Schedule) -> Iterator[str]:
        """Flags that were given but change nothing in any of these schedules, each with the reason."""
        names = {name for name, value in self.values.items() if value is not None}
        if "sync" not in names and names & {"sync_mode", "sync_slowdown", "replicas"}:
            yield (
                "--sync-mode, --sync-slowdown and --replicas change nothing unless --sync gives a sync's "
                "seconds."
            )
        large = next((schedule for schedule in schedules if schedule.stages != schedule.workers), None)
        if large is not None and self.costs_of is CostsOf.STAGE and len(schedules) == 1:
            yield (
                f"costs are those of one stage, and {large.scheme} has {large.stages} for {large.workers} "
                "workers; to compare it with other schemes give costs of a worker's share: --costs-of worker."
            )
        idle = [name for name in OF_SPLIT_BACKWARDS if name in names]
        if idle and not any(_is_split(schedule) for schedule in schedules):
            verb = "changes" if len(idle) == 1 else "change"
            scheme = registry.find(schedules[0].scheme)
            can = scheme is not None and scheme.option(SPLIT.name) is not None
            yield (
                f"{' and '.join(map(flag, idle))} {verb} nothing: no backward of {schedules[0]} is split; "
                f"{f'add {flag(SPLIT.name)}, or ' if can else ''}choose a scheme with a split backward."
            )


class ModelCostOptions(CostOptions):
    """Costs of a model that schemes cut into different stages: one number each."""

    unit: ClassVar[CostsOf] = CostsOf.WORKER
    panels: ClassVar[Mapping[type, str]] = {Costs: _MODEL_COSTS, ByteCosts: _MODEL_MEMORY}


def _is_split(schedule: Schedule) -> bool:
    return any(op.kind.rest is not None for op in schedule.ops())


def _in_flag(name: str) -> str:
    return f"{flag(name)} "


def numbers_of(name: str, text: str) -> float | tuple[float, ...]:
    """The value of a flag: a number, or several separated by commas.

    Raises:
        ConfigError: the text is not a number.
    """
    return cost_texts.numbers_of(name, text, _in_flag)


def bytes_of(name: str, text: str) -> float | tuple[float, ...]:
    """A size or several sizes in bytes, as in 300MB or 1.5GiB.

    Raises:
        ConfigError: the text is not a size.
    """
    return cost_texts.bytes_of(name, text, _in_flag)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with each parameter that is a group of options unfolded into the group's flags."""
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[OptionGroup]] = {}
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and issubclass(group, OptionGroup)):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        unfolded_ = group.parameters()
        for name in {added.name for added in unfolded_} & {p.name for p in parameters}:
            raise ConfigError(
                f"{command.__name__} has a flag {flag(name)}; give the scheme's option another name"
            )
        parameters += unfolded_

    @functools.wraps(command)
    def unfolded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group.pop_from(values)
        command(**values)

    unfolded.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=sorted(parameters, key=lambda p: p.kind)
    )
    unfolded.__annotations__ = {p.name: p.annotation for p in parameters}
    return unfolded
