"""The command's frame: global options, the list of commands, and how errors reach the user.

Invariant: whatever a command raises ends as one message on stderr and an exit code; a traceback is shown
only with ``--debug``.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from counterflow import __version__
from counterflow.errors import ConfigError, CounterflowError

from .options.flags import ENDS_PROCESS, with_flags
from .options.wording import in_flags
from .output.visible import VisibleFormatter, echo, visible

COMMANDS: dict[str, tuple[str, ...]] = {
    "train": (
        "train",
        "train --workers 2 --dry-run",
        "train --scheme hanayo --steps 100 --set train.samples=64 --out runs/waves",
        "train runs/waves/config.toml --workers 2 --out runs/two --json",
    ),
    "convert": (
        "train --steps 20 --out first",
        "convert first weights.safetensors",
        "convert weights.safetensors begin --json",
        "train --steps 20 --set train.resume=begin",
    ),
    "schemes": ("schemes", "schemes --json"),
    "simulate": (
        "simulate chimera --stages 8 --micro-batches 8",
        "simulate hanayo --workers 4 --waves 2 --micro-batches 8 --p2p 0.1 --json",
        "simulate dapple --stages 4 --micro-batches 8 --weight-bytes 2GiB --activation-bytes 300MiB",
        "export chimera --stages 4 --micro-batches 8 --out edited.json",
        "simulate edited.json",
    ),
    "compare": (
        "compare --workers 4 --micro-batches 8 --peak 4",
        "compare --workers 4 --micro-batches 8 --peak 4 --copies 1 --synchronous",
        "compare --workers 4 --micro-batches 8 --p2p 0.1 --seconds 0 --out ranked.png",
        "compare --workers 4 --micro-batches 8 --seconds 0 --sweep p2p=0,0.1,0.2 --out sweep.png",
        "compare --workers 2 --micro-batches 4 --scheme 1f1b --scheme zb-v --moves 100 --json",
    ),
    "synthesize": (
        "synthesize --placement vee --workers 4 --micro-batches 8 --peak 6 --forward 3 --input-gradient 4 "
        "--weight-gradient 2 --moves 2000 --out mine.json",
        "check mine.json",
        "synthesize --placement straight --workers 4 --micro-batches 8 --peak 4 --json",
    ),
    "profile": (
        "profile --sizes 1,4 --repeats 3 --out here",
        "profile --set model.layers=2 --sizes 1,2,4 --workers 1 --json",
    ),
    "plan": (
        "plan --example chimera-bert48 --stale",
        "plan --example chimera-bert48 --scheme chimera --workers 4 --top 5 --out plan.toml",
        "plan --example chimera-bert48 --workers 4 --option chimera.pairs=1 --cuts even --json",
        'plan --example chimera-bert48 --scheme dapple --cuts "Et*24|t*24,L" --layout',
        "plan --example mixpipe-bert48 --save-inputs mine",
        "plan --example mixpipe-bert48 --cluster mine/cluster.toml --scheme mixpipe --workers 4 --json",
    ),
    "layout": (
        'layout "Et*3|(tt|)*29,m|L" --layers 48 --pp 8 --vpp 2',
        'layout "Et*4|(t*4|)*14,tmL" --pp 8 --vpp 1 --json',
    ),
    "mesh": (
        "mesh --workers 2 --set mesh.dp_shard=2 --set mesh.tp=2",
        "mesh --workers 2 --set mesh.cp=2 --json",
    ),
    "check": (
        "check mixpipe --stages 8 --micro-batches 16 --injected max",
        "export chimera --stages 4 --micro-batches 8 --out edited.json",
        "check edited.json --json",
    ),
    "lint": (
        "export interleaved --workers 4 --chunks 2 --micro-batches 8 --out mine.json",
        "lint mine.json",
        "lint mine.json --communicators pair --rule eager --rule blocking --json",
    ),
    "show": (
        "show chimera --stages 4 --micro-batches 8",
        "show chimera --stages 8 --micro-batches 16 --out chimera.svg --memory",
        "show chimera --stages 8 --micro-batches 16 --compare dapple",
        'show gems --stages 4 --micro-batches 8 --compare "gpipe --stages 4 --micro-batches 8 --groups 2"',
    ),
    "explore": ("explore", "explore --no-open --port 0"),
    "export": ("export chimera --stages 4 --micro-batches 8 --out chimera.json",),
    "verify": (
        "verify chimera --stages 4 --micro-batches 8",
        "verify hanayo --workers 2 --waves 2 --micro-batches 4 --replicas 2 --transport gloo",
        "export chimera --stages 4 --micro-batches 8 --out edited.json",
        "verify edited.json --dtype float32",
    ),
    "doctor": ("doctor", "doctor --no-test --json"),
    "reproduce": (
        "reproduce --list",
        "reproduce chimera-table2",
        "reproduce chimera-fig14 --out fig14.png",
    ),
}
"""Every command by its file in ``commands``, with examples."""


class _LazyCommands(Mapping[str, Any]):
    """The commands, each loaded when it is looked up, so a command does not wait for imports that only others
    need.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.loaded:
            shown = [f"  counterflow {example}" for example in COMMANDS[name]]
            epilog = "\n\n".join(["Examples:" if len(shown) > 1 else "Example:", *shown])
            command = getattr(import_module(f"{__package__}.commands.{name}"), name)
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            paragraphs = (inspect.getdoc(command) or "").split("\n\n")
            shown_help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            app.command(name=name, help=shown_help, epilog=epilog, cls=Command)(with_flags(command))
            self.loaded[name] = typer.main.get_command(app)
        return self.loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Command(TyperCommand):
    """A command whose help ends with ``--help`` and shows a value only where an option accepts one."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options in the order of their panels."""
        *options, help_option = super().get_params(ctx)
        panels = [
            getattr(option, "rich_help_panel", None) for option in options if isinstance(option, TyperOption)
        ]
        if panels and None not in panels:
            help_option.rich_help_panel = panels[-1]  # type: ignore[attr-defined]
        for option in (*options, help_option):
            if getattr(option, "is_bool_flag", False):
                option.metavar = ""
            elif isinstance(option, TyperOption) and option.metavar is None and option.min is not None:
                option.metavar = "NUMBER"
        return [*options, help_option]


class Commands(TyperGroup):
    """The commands, with errors turned into messages and exit codes."""

    def __init__(self, **extra: Any) -> None:
        super().__init__(**extra)
        self.commands = _LazyCommands()  # type: ignore[assignment]

    def get_params(self, ctx: Any) -> list[Any]:
        """The options, of which flags show no value."""
        options = super().get_params(ctx)
        for option in options:
            if getattr(option, "is_bool_flag", False):
                option.metavar = ""
        return options

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--debug`` anywhere on the command line."""
        rest = [arg for arg in args if arg != "--debug"]
        return super().parse_args(ctx, rest if len(rest) == len(args) else ["--debug", *rest])

    def invoke(self, ctx: Any) -> Any:
        """Run a command and turn its errors into a line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except CounterflowError as error:
            failure: Exception = error
            message, code = in_flags(str(error)), 2 if isinstance(error, ConfigError) else 1
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            if ctx.params.get("debug"):
                traceback.print_exc()
            echo("Interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from None
        except Exception as error:
            if _is_usage_error(error):
                if isinstance(said := getattr(error, "message", None), str):
                    error.message = visible(_shortened(said))  # type: ignore[attr-defined]
                raise
            failure = error
            message, code = _unforeseen(error)
        if ctx.params.get("debug"):
            traceback.print_exception(failure)
        echo(f"Error: {_shortened(message)}", err=True)
        raise typer.Exit(code)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Show usage errors as plain text like all other errors; only help uses panels."""
        self.rich_markup_mode = None
        return super().main(*args, **extra)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, in panels."""
        self.rich_markup_mode = "rich"
        super().format_help(ctx, formatter)


_INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def _unforeseen(error: Exception) -> tuple[str, int]:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{error.filename}: this is not a legal file name; choose another", 2
    if isinstance(error, OSError) and error.filename is None and error.errno in _NO_SPACE:
        _discard_output()
        return f"cannot write the output: {error.strerror}", 1
    if isinstance(error, MemoryError):
        return "this takes more memory than this process may have; choose smaller sizes or files", 1
    text = " ".join(str(error).split())
    name = type(error).__name__
    message = f"{name}: {text}" if text else name
    return f"{message}\nThis is a bug in Counterflow; run again with --debug and report what it shows.", 1


_NO_SPACE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO


def _discard_output() -> None:
    # What could not be written may be in a buffer still, and would fail again when the process ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_LONGEST, _LONGEST_WORD = 1_000, 200
"""Maximum length in characters of a message (about ten lines) and of a word in it, which is usually the
user's input or a path.
"""


def _shortened(message: str) -> str:
    """A message and its words, each shortened to its beginning and end if it is too long to be read.

    >>> _shortened("no file " + "x" * 500 + ".toml: give one")[90:]
    'xxxxxxxxxxxxxxxxxx… (381 more) …xxxxxxxxxxxxxxxxxxx.toml: give one'
    """
    message = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: _short_word(word.group()), message)
    if len(message) <= _LONGEST:
        return message
    begin, end = message[: _LONGEST * 7 // 10], message[-_LONGEST // 5 :]
    return f"{begin} … ({len(message) - len(begin) - len(end):,} characters omitted) … {end}"


def _short_word(word: str) -> str:
    begin, end = word[: _LONGEST_WORD // 2], word[-_LONGEST_WORD // 8 :]
    return f"{begin}… ({len(word) - len(begin) - len(end):,} more) …{end}"


def _is_usage_error(error: Exception) -> bool:
    return any(base.__name__ == "ClickException" for base in type(error).__mro__)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"counterflow {__version__}")
        raise typer.Exit


def _global(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug logs; may follow the command.")
    ] = False,
) -> None:
    """Pipeline-parallel training for PyTorch: schedules proved, timed, drawn and run."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    if debug:
        logging.getLogger("counterflow").setLevel(logging.DEBUG)


def application() -> typer.Typer:
    """All commands; each has the options of the schemes that are registered when it is first used."""
    app = typer.Typer(
        cls=Commands,
        name="counterflow",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
        epilog="\n\n".join(
            [
                "Results go to stdout, everything else to stderr; --json prints one JSON object.",
                "Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 130 Ctrl-C. Of train also "
                "75 after another signal: the run can go on.",
                "Example: counterflow simulate chimera --stages 4 --micro-batches 8",
            ]
        ),
    )
    app.callback()(_global)
    return app


def main() -> None:
    """Entry point of the command ``counterflow``."""
    for name in ("stdout", "stderr"):  # None if it was closed
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks some characters shows ? in their place
            stream.reconfigure(errors="replace")
    try:
        try:
            application()(prog_name="counterflow", obj=ENDS_PROCESS)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before a command runs, or after
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # the reader of the output closed the pipe
        _discard_output()
        sys.exit(1)
    except OSError as error:  # the end of the output
        echo(f"Error: {_unforeseen(error)[0]}", err=True)
        sys.exit(1)
