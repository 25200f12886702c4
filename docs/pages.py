"""The site's pages that the code makes: schemes, commands, keys of a config, the API. A hook of mkdocs.

Invariant: nothing here is described a second time; pages come from the schemes' records, the commands' own
help, the table behind ``train --keys`` and the docstrings. A page that would load anything from elsewhere is
refused.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import counterflow
from counterflow.cli import application
from counterflow.cli.app import COMMANDS
from counterflow.common import toml
from counterflow.drawing import chart_of
from counterflow.drawing.notebook import svg_of
from counterflow.drawing.page import page as live_page
from counterflow.papers import closed_forms
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.scheme import Option, Scheme
from counterflow.simulation import Costs, simulate
from counterflow.training.load import known_keys

ROOT = Path(__file__).parents[1]

SHOWN = {"stages": 4, "workers": 4, "micro_batches": 8}
"""The case that every scheme's page draws, as far as it has these options."""

_FORMS = {
    "gpipe": ("flushed_", "gpipe_"),
    "dapple": ("flushed_", "one_forward_one_backward_"),
    "pipedream": ("pipedream_",),
    "mixpipe": ("mixpipe_",),
}
"""By scheme, how the names of its closed forms begin, where that is not the scheme's name."""


def schedule_shown(scheme: Scheme) -> Schedule:
    """The scheme's case that is drawn."""
    options = {option.name: SHOWN[option.name] for option in scheme.options if option.name in SHOWN}
    return registry.build(scheme.name, options)


def schemes_page() -> str:
    """Every scheme: what it is, its options, its picture, its numbers here and its formulas in the papers."""
    parts = [
        "# Schemes",
        "Made from the schemes' records. Pictures and numbers are of four workers and eight micro-batches, "
        "with a backward that takes twice as long as a forward, and free messages. What is best for your "
        "model and cluster `counterflow plan` says; see also [how to choose](choosing-a-scheme.md).",
    ]
    for scheme in registry.SCHEMES.values():
        parts += _scheme(scheme)
    return "\n\n".join(parts) + "\n"


def _scheme(scheme: Scheme) -> Iterator[str]:
    yield f"## {scheme.name}"
    also = f" Also called {', '.join(scheme.aliases)}." if scheme.aliases else ""
    flush = "" if scheme.synchronous else " It has no flush: work uses old weights."
    yield f"{_sentence(scheme.summary)}{also}{flush} Source: {_sentence(scheme.source)}"
    schedule = schedule_shown(scheme)
    yield f"![The timeline of {schedule}](schemes/{scheme.name}.svg)"
    share = schedule.workers / schedule.stages
    found = simulate(schedule, Costs(forward=share, backward=2 * share))
    steady = found.steady_bubble_ratio
    least, most = (pick(found.peak_activations) * share for pick in (min, max))
    yield _table(
        ("of this case", ""),
        [
            ("bubble ratio", f"{found.bubble_ratio if steady is None else steady:.1%}"),
            (
                "weights on a worker, of a stage at one worker a stage",
                f"{max(found.weight_copies) * share:g}",
            ),
            (
                "activations on a worker, likewise",
                f"{least:g}" if least == most else f"{least:g} to {most:g}",
            ),
        ],
    )
    yield _table(("option", "legal", "default", "what it is"), [_option(o) for o in scheme.options])
    forms = list(_forms(scheme.name))
    if forms:
        yield "In the papers, in forwards of one stage (F = 1):"
        yield _table(("closed form", "what it says"), forms)


def _option(option: Option) -> tuple[str, str, str, str]:
    return f"`{option.name}`", option.legal, "" if option.required else str(option.usual), option.help


def _forms(name: str) -> Iterator[tuple[str, str]]:
    begins = _FORMS.get(name, (f"{name.replace('-', '_')}_",))
    for known, form in inspect.getmembers(closed_forms, inspect.isfunction):
        if form.__module__ == closed_forms.__name__ and known.startswith(begins):
            text = inspect.getdoc(form) or ""
            yield f"`{known}`", " ".join(text.partition(">>>")[0].split())


def commands_page() -> str:
    """Every command's own help."""
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "100"})
    app = application()
    parts = ["# Commands", "What each prints with `--help`. With `--json` they print [one object](json.md)."]
    for words in ([], *([name] for name in COMMANDS)):
        shown = runner.invoke(app, [*words, "--help"], prog_name="counterflow").stdout
        lines = "\n".join(line.rstrip() for line in shown.strip("\n").splitlines())
        parts += [f"## {' '.join(['counterflow', *words])}", f"```text\n{lines}\n```"]
    return "\n\n".join(parts) + "\n"


def keys_page() -> str:
    """Every key of a config."""
    parts = [
        "# Keys of a config",
        "What `counterflow train --keys` lists. A config needs only what differs from the defaults; on the "
        "command line a key is `--set SECTION.KEY=VALUE`.",
    ]
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    for key in known_keys():
        section, name = key.key.split(".")
        default = "" if key.default is None else f"`{toml.dumps(key.default)}`"
        sections.setdefault(section, []).append((f"`{name}`", default, key.about, key.legal))
    for section, rows in sections.items():
        parts += [f"## [{section}]", _table(("key", "default", "what it is", "legal"), rows)]
    return "\n\n".join(parts) + "\n"


API = {
    "counterflow": [name for name in counterflow.__all__ if name not in ("models", "schemes")],
    "counterflow.planning": ["Configuration", "Prediction", "predict", "Model", "Profile", "Cluster"],
    "counterflow.training": ["load_config", "Callback", "TensorBoard"],
    "counterflow.training.run": ["run"],
}
"""The names of the reference, by the module from which they are imported."""


def api_page() -> str:
    """Every public name, from its docstring."""
    parts = [
        "# Python API",
        "The schemes themselves are functions of `counterflow.schemes`: [schemes](schemes.md).",
    ]
    for module, names in API.items():
        parts.append(f"## {module}")
        parts += [f"::: {_home(module, name)}" for name in names]
    return "\n\n".join(parts) + "\n"


def _home(module: str, name: str) -> str:
    """Where a public name is defined: its docstring is read there."""
    found = getattr(__import__(module, fromlist=[name]), name)
    return f"{found.__module__}.{getattr(found, '__qualname__', name)}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *(tuple(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return escape(text, quote=False).replace("|", "\\|").replace("*", "\\*")


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


# --- What mkdocs calls --------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "schemes.md": schemes_page,
    "commands.md": commands_page,
    "keys.md": keys_page,
    "api.md": api_page,
}


FROM_THE_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
"""Pages whose files lie beside ``docs``."""


def on_config(config: Any) -> Any:
    """Put pages that the navigation does not name under More."""
    named = set(_named(config.nav))
    rest = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named)
    if rest:
        config.nav.append({"More": rest})
    return config


def _named(nav: Any) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else _named(value)


LIVE = re.compile(
    r"^```console\n\$ counterflow show ([a-z0-9-]+)((?: --[a-z-]+ \d+)+)\n.*?^```$", re.DOTALL | re.MULTILINE
)
"""A block of a page that shows a schedule in text."""


def live_pages() -> dict[str, str]:
    """Every schedule that a page shows in text, as a page to play with, by file name."""
    found = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        for block in LIVE.finditer(path.read_text(encoding="utf-8")):
            words = block[2].replace(" --", "\n").split("\n")[1:]
            split = (word.split() for word in words)
            sizes: dict[str, OptionValue] = {name.replace("-", "_"): int(size) for name, size in split}
            result = simulate(registry.build(block[1], sizes))
            found[_live_name(block)] = live_page([chart_of(result)])
    return found


def _live_name(block: re.Match[str]) -> str:
    return f"live/{'-'.join(re.findall(r'[a-z0-9]+', block[1] + block[2]))}.html"


def _with_live_picture(block: re.Match[str]) -> str:
    about = f"The same as a picture: {block[1]}{block[2]}. Point at an op to see what it needs."
    frame = f'<iframe class="live" src="{_live_name(block)}" title="{about}" loading="lazy"></iframe>'
    return f"{block[0]}\n\n{frame}"


WEIGHTS = {"Understand": 0.1, "Reference": 0.001}
"""What pages of these parts count in the search, where a guide counts 1, and a word in a title 1,000."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made, the schemes' pictures, and README as the first page."""
    from mkdocs.structure.files import File  # noqa: PLC0415  (the tests read the pages without mkdocs)

    def add(name: str, content: str) -> None:
        files.append(File.generated(config, name, content=content))

    for name, page in PAGES.items():
        add(name, page())
    for scheme in registry.SCHEMES.values():
        add(f"schemes/{scheme.name}.svg", svg_of(simulate(schedule_shown(scheme))) or "")
    for name, content in live_pages().items():
        add(name, content)
    for name, source in FROM_THE_ROOT.items():
        add(name, (ROOT / source).read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page as the site has them: files that are no pages are named only."""
    if page.parent is not None and page.parent.title in WEIGHTS:
        page.meta["search"] = {"boost": WEIGHTS[page.parent.title]}
    markdown = LIVE.sub(_with_live_picture, markdown)
    if page.file.src_uri in FROM_THE_ROOT:
        markdown = re.sub(r"\]\((?:docs/)", "](", markdown)
    return re.sub(r"\[([^\]]+)\]\(((?:\.\./)*(?:benchmarks|examples|src|tests)/[^)]*)\)", r"`\2`", markdown)


_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data)\s*=\s*[\"']?\s*"
    r"((?:https?:)?//[^\"'\s>]*)"
    r"|<link\b(?![^>]*rel=[\"']?(?:canonical|next|prev))[^>]*?href\s*=\s*[\"']?\s*((?:https?:)?//[^\"'\s>]*)"
    r"|(?:@import|url\()\s*[\"']?\s*((?:https?:)?//[^\"')\s]*)",
    re.IGNORECASE,
)


def loaded_from_elsewhere(text: str) -> list[str]:
    """What a page or a style sheet would load from another host.

    >>> loaded_from_elsewhere('<a href="https://x.org">x</a> <script src="//x.org/a.js"></script>')
    ['//x.org/a.js']
    """
    return [next(filter(None, found)) for found in _LOADED.findall(text)]


def on_post_build(config: Any) -> None:
    """Refuse a site that loads anything from another host."""
    wrong = [
        f"{path}: loads {target}"
        for path in Path(config.site_dir).rglob("*")
        if path.suffix in (".html", ".css")
        for target in loaded_from_elsewhere(path.read_text(encoding="utf-8"))
    ]
    if wrong:
        shutil.rmtree(config.site_dir)
        raise SystemExit("\n".join(wrong))
