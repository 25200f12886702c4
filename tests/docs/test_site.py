"""The site's pages that the code makes, and its check that nothing comes from elsewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import counterflow as cf
from counterflow.schedule import registry
from counterflow.training.load import known_keys

from ..cli.test_printed_commands import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "pages.py"))


def test_every_scheme_has_its_picture_numbers_options_and_formulas(made: dict[str, Any]) -> None:
    sections = re.split(r"^## ", made["schemes_page"](), flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == list(registry.SCHEMES)
    for section, scheme in zip(sections, registry.SCHEMES.values(), strict=True):
        assert f"](schemes/{scheme.name}.svg)" in section
        assert all(f"| `{option.name}` |" in section for option in scheme.options)
    chimera = next(section for section in sections if section.startswith("chimera\n"))
    found = cf.simulate(cf.schemes.chimera(4, 8))
    assert f"| bubble ratio | {found.bubble_ratio:.1%} |" in chimera
    assert "(D−2f)/(2fN+D−2f)" in chimera
    assert "Table 2" in chimera


def test_every_command_and_key_is_there(made: dict[str, Any]) -> None:
    commands = made["commands_page"]()
    found = re.findall(r"^## counterflow ?(.*)$", commands, re.MULTILINE)
    assert sorted(found) == sorted(["", *COMMANDS])
    assert commands.count("Usage: counterflow") == len(found)
    keys = made["keys_page"]()
    rows = [line for line in keys.splitlines() if line.startswith("| `")]
    assert len(rows) == len(known_keys())
    assert "| `steps` | `400` | mini-batches to train on, one update each |" in keys


def test_the_reference_has_every_public_name(made: dict[str, Any]) -> None:
    page = made["api_page"]()
    for name in cf.__all__:
        if name not in ("models", "schemes"):
            found = getattr(cf, name)
            assert f"::: {found.__module__}.{getattr(found, '__qualname__', name)}\n" in page


def test_schedules_of_the_learning_page_are_pictures_to_play_with(made: dict[str, Any]) -> None:
    pages = made["live_pages"]()
    text = (ROOT / "docs" / "pipeline-schedules.md").read_text(encoding="utf-8")
    there = SimpleNamespace(file=SimpleNamespace(src_uri="x.md"), parent=None, meta={})
    frames = re.findall(r'<iframe class="live" src="([^"]+)"', made["on_page_markdown"](text, there))
    assert len(frames) == text.count("$ counterflow show ")
    assert set(frames) <= set(pages)
    assert '"gpipe' in pages["live/gpipe-stages-4-micro-batches-4.html"]


def test_the_search_gives_guides_before_the_reference(made: dict[str, Any]) -> None:
    boosts = []
    for part in ("Learn", "Do", "Understand", "Reference"):
        page = SimpleNamespace(
            file=SimpleNamespace(src_uri="x.md"), parent=SimpleNamespace(title=part), meta={}
        )
        made["on_page_markdown"]("", page)
        boosts.append(page.meta.get("search", {"boost": 1})["boost"])
    assert boosts == [1, 1, 0.1, 0.001]


def test_every_page_can_be_reached(made: dict[str, Any]) -> None:
    config = SimpleNamespace(nav=[{"Start": "index.md"}, {"Reference": [{"JSON": "json.md"}, "gpus.md"]}])
    more = made["on_config"](config).nav[-1]["More"]
    assert "planning.md" in more
    assert not {"json.md", "gpus.md", "index.md"} & set(more)


def test_links_to_files_that_are_no_pages_are_named(made: dict[str, Any]) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), parent=None)
    text = "[a](docs/gpus.md) ![b](docs/pictures/x.png) [kept](benchmarks/results) [e](examples/gpt.toml)"
    assert made["on_page_markdown"](text, page=page) == (
        "[a](gpus.md) ![b](pictures/x.png) `benchmarks/results` `examples/gpt.toml`"
    )


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ('<script async src="https://a.org/x.js"></script>', ["https://a.org/x.js"]),
        ("<img alt='x' src=//a.org/x.png>", ["//a.org/x.png"]),
        ('<link rel="stylesheet" href="https://a.org/x.css">', ["https://a.org/x.css"]),
        ('<link href="http://a.org/font" rel="preconnect">', ["http://a.org/font"]),
        (
            "@import 'https://a.org/x.css'; a { b: url(https://a.org/x) }",
            ["https://a.org/x.css", "https://a.org/x"],
        ),
        ('<a href="https://a.org">a</a> <img src="x.png"> <script src="a/b.js"></script> url(x.png)', []),
        ('<link rel="canonical" href="https://a.org/">', []),
    ],
)
def test_what_comes_from_elsewhere_is_found(made: dict[str, Any], text: str, loaded: list[str]) -> None:
    assert made["loaded_from_elsewhere"](text) == loaded


def test_a_site_that_loads_something_is_refused(made: dict[str, Any], tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text('<a href="https://a.org">a</a>')
    made["on_post_build"](SimpleNamespace(site_dir=str(site)))
    (site / "x.css").write_text("a { b: url(https://a.org/x) }")
    with pytest.raises(SystemExit, match=r"x\.css: loads https://a\.org/x"):
        made["on_post_build"](SimpleNamespace(site_dir=str(site)))
    assert not site.exists()
