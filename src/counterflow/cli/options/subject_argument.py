"""From a scheme with options, or a file, to a schedule."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.player import accelerated
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.scheme import DEPTH, SLICES

from ..output.console import note
from .flags import SchemeOptions
from .wording import flag, flag_of


class FileFormat(StrEnum):
    """File formats of a schedule."""

    JSON = "json"
    CSV = "csv"


def as_text(schedule: Schedule, form: FileFormat) -> str:
    """The schedule in this file format.

    Raises:
        ConfigError: the schedule contains something that the format cannot express.
    """
    from counterflow.schedule import formats, torch_csv

    return torch_csv.dumps(schedule) if form is FileFormat.CSV else formats.dumps(schedule)


def is_scheme(subject: str) -> bool:
    """Check that ``subject`` is the name of a scheme rather than a file."""
    return registry.find(subject) is not None


def is_file(subject: str) -> bool:
    """Check that ``subject`` is a file, or looks like the name of one."""
    return (
        bool(subject)
        and not is_scheme(subject)
        and (Path(subject).exists() or "/" in subject or subject.endswith((".json", ".csv")))
    )


def is_run(subject: str) -> bool:
    """Check that ``subject`` is the folder of a run of ``counterflow train``."""
    if is_scheme(subject) or not Path(subject).is_dir():
        return False
    from counterflow.training.folder import is_run as holds_run

    return holds_run(Path(subject))


def schedule_of(subject: str, options: SchemeOptions) -> Schedule:
    """The schedule the user means.

    Raises:
        ConfigError: the subject is neither a scheme nor a file, the options do not fit, or the file is
            damaged.
    """
    if not is_file(subject):
        return build(subject, options.set_values())
    set_options = options.set_values()
    if set_options:
        shown = ", ".join(flag(name) for name in set_options)
        raise ConfigError(f"{subject} is a schedule file, which fixes its own options: leave out {shown}")
    return load(subject)


def load(path: str) -> Schedule:
    """The schedule in a file.

    Raises:
        ConfigError: the file cannot be read, or is damaged.
    """
    from counterflow.schedule.formats import loads

    either = " or folder; give a scheme of 'counterflow schemes', a schedule file or, to show, a run's folder"
    return loads(read_text(path, "is a directory, not a schedule file", if_missing=either), path)


def build(name: str, options: dict[str, OptionValue]) -> Schedule:
    """The schedule of a scheme; errors name missing and superfluous options as flags.

    Raises:
        ConfigError: the scheme is unknown, or an option is unknown, missing or illegal.
    """
    scheme = registry.scheme(name)
    names = [option.name for option in scheme.options]
    extra = [option for option in options if option not in names and option not in (*DEPTH, SLICES)]
    if extra:
        raise ConfigError(
            f"{scheme.name} has no {' and no '.join(map(flag, extra))}; "
            f"its options: {', '.join(map(flag, names))}"
        )
    set_names = {
        scheme.depth if name in DEPTH else name for name in options
    }  # workers stand for stages, and the reverse
    if missing := scheme.missing(set_names):
        wanted = " and ".join(flag(option.name) for option in missing)
        width = max(len(flag(option.name)) for option in missing)
        lines = [f"  {flag(o.name):<{width}}  {o.help} ({o.legal})" for o in missing]
        raise ConfigError("\n".join([f"{scheme.name} needs {wanted}", *lines]))
    return registry.build(name, options, accelerated)


def build_beside(schedule: Schedule, name: str, user_options: dict[str, OptionValue]) -> Schedule:
    """The scheme ``name`` with all options of another schedule that it accepts.

    Args:
        schedule: the schedule to compare with; its workers stand in for stages, and the other way round.
        name: the other scheme.
        user_options: the options the user gave for ``schedule``.

    Raises:
        ConfigError: the scheme needs an option that the other does not have, or cannot be built with these.
    """
    scheme = registry.scheme(name)
    known = dict(user_options)
    if not known:  # for a file: the options its scheme was built with
        known = dict(schedule.options)
    known[scheme.depth] = schedule.workers
    names = [*(o.name for o in scheme.options), SLICES]
    options = {name: known[name] for name in names if name in known}
    try:
        return build(name, options)
    except ConfigError as error:
        shown = " ".join(flag_of(name, value) for name, value in options.items())
        raise ConfigError(
            f'--compare {name}: {error}\nTo give it options of its own: --compare "{name} {shown} …"'
        ) from error


def warn_if_wrong(subject: str, schedule: Schedule) -> None:
    """Warn on stderr if a schedule file does not pass the checker; schedules of schemes always pass."""
    if not is_file(subject):
        return
    from counterflow.program.checker import inspect

    broken = [result.rule for result in inspect(schedule).results if result.ok is False]
    if broken:
        note(
            f"Warning: {subject} does not pass the checker ({', '.join(broken)}); "
            f"see: counterflow check {subject}"
        )


def periods_for_steady(schedule: Schedule) -> int | None:
    """The fewest periods with which an asynchronous scheme has a steady part; None if not known."""
    options = dict(schedule.options)
    if "periods" not in options or not is_scheme(schedule.scheme):
        return None
    for periods in range(schedule.periods + 1, schedule.periods + 2 * schedule.stages + 4):
        try:
            longer = registry.build(schedule.scheme, options | {"periods": periods}, accelerated)
        except (ConfigError, ScheduleError):
            return None
        if longer.steady is not None:
            return periods
    return None
