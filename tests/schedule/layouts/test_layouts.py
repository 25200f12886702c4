"""Layouts of Megatron-LM: read, written, fitted, re-derived; public ones, and some that went stale."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.errors import ConfigError
from counterflow.schedule.cuts import explicit
from counterflow.schedule.layouts import LayerKind, Layout, Stage, rederive
from counterflow.schedule.placement import looped

HERE = Path(__file__).parent
PUBLIC = tomllib.loads((HERE / "public.toml").read_text(encoding="utf-8"))["layouts"]
STALE = tomllib.loads((HERE / "stale.toml").read_text(encoding="utf-8"))["cases"]

E, T, M, L = LayerKind


def in_megatron(text: str) -> list[str]:
    """The stages that Megatron-LM's documentation says of a string: repeats first, groups before letters."""
    text = text.replace(",", "")
    while "(" in text:
        begin = text.index("(")
        end = text.index(")", begin)
        times = re.match(r"\*(\d+)", text[end + 1 :])
        assert times is not None
        text = text[:begin] + text[begin + 1 : end] * int(times[1]) + text[end + 1 + times.end() :]
    while "*" in text:
        place = text.index("*")
        times = re.match(r"\d+", text[place + 1 :])
        assert times is not None
        text = text[: place - 1] + text[place - 1] * int(times[0]) + text[place + 1 + times.end() :]
    return text.split("|")


def stages_of(layout: Layout) -> list[str]:
    return ["".join(stage) for stage in layout.stages]


runs = st.lists(st.tuples(st.sampled_from(list(LayerKind)), st.integers(1, 12)), max_size=4).map(
    lambda parts: tuple(kind for kind, count in parts for _ in range(count))
)
"""Any stage."""

blocks = st.lists(
    st.tuples(st.lists(runs, min_size=1, max_size=3), st.integers(1, 9)), min_size=1, max_size=4
)


@st.composite
def legal(draw: Any, most: int = 12) -> Layout:
    """A layout whose embedding, MTP layers and loss are where they belong; inner stages may be empty."""
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=most))
    tail = draw(st.sampled_from([["L"], ["mL"], ["m", "L"], ["mm", "L"], ["m", "m", "L"]]))
    stages: list[Stage] = [(T,) * count for count in counts]
    stages[0] = (E, *stages[0])
    stages[-1] = (*stages[-1], *map(LayerKind, tail[0]))
    return Layout((*stages, *(tuple(map(LayerKind, rest)) for rest in tail[1:])))


@given(blocks)
def test_what_is_written_is_read_back_here_and_by_megatron(parts: list[tuple[list[Stage], int]]) -> None:
    layout = Layout(tuple(stage for block, times in parts for _ in range(times) for stage in block))
    text = str(layout)
    assert Layout.read(text) == layout
    assert in_megatron(text) == stages_of(layout)
    assert len(text) <= len("|".join(stages_of(layout)))


@given(st.text("EtmL|(),*0123 x", max_size=24))
def test_a_text_is_read_as_megatron_reads_it_or_refused_with_its_place(text: str) -> None:
    try:
        layout = Layout.read(text)
    except ConfigError as error:
        told = str(error)
        assert re.search(r"at character \d+ expected .*, got |at most 10,000", told)
    else:
        assert stages_of(layout) == in_megatron(text.replace(" ", ""))
        assert Layout.read(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Etx|L", "at character 3 expected E, t, m, L, | or (, got 'x'"),
        ("E(tx)*2", "at character 4 expected E, t, m, L, | or ), got 'x'"),
        ("Et*|L", "at character 3 expected a whole number after *, got '*'"),
        ("*3", "at character 1 expected E, t, m, L, | or (, got '*'"),
        ("Et*3*2", "at character 5 expected E, t, m, L, | or (, got '*'"),
        ("E(tt|)L", "at character 7 expected *n, which says how often the group is repeated, got 'L'"),
        (
            "E(tt|",
            "at character 6 expected ) and *n, which end the group that begins at character 2, got the end",
        ),
        (
            "E((t)*2|)*2",
            "at character 3 expected E, t, m, L, | or ): a group contains no other group, got '('",
        ),
        ("E()*2", "at character 3 expected the layers of the group, got ')'"),
        ("E(*2t)*2", "at character 3 expected the layers of the group, got '*'"),
        ("E)*2", "at character 2 expected E, t, m, L, | or (, got ')'"),
        ("(t*999|)*9999", "has 9,999,000 layers and stages; at most 10,000 are read"),
        ("t*" + "9" * 5000, "has 1,000,000,000 or more layers and stages; at most 10,000 are read"),
        ("Et*999999999999|L", "has 1,000,000,000 or more layers and stages; at most 10,000 are read"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^layout '.*{re.escape(told)}$"):
        Layout.read(text)


def test_a_layout_has_stages() -> None:
    with pytest.raises(ConfigError, match="a layout of no stages: expected one or more"):
        Layout(())


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("E,ttt | t t t|tttL", "Et*3|t*3|t*3,L"),
        ("Ettttt|(ttttt|)*14tttttL", "Et*5|(t*5|)*14,t*5,L"),
        ("E(|tt)*30,|mL", "E|(tt|)*30,mL"),
        ("Et||||||||t|L", "Et|(|)*7,t|L"),
        ("Et|tt|t|tt|t|tt|tL", "Et|tt|t|tt|t|tt|tL"),  # a group would be no shorter
        ("Et|tt|t|tt|t|tt|t|tL", "Et|(tt|t|)*3,tL"),
    ],
)
def test_the_shortest_text(text: str, shortest: str) -> None:
    assert str(Layout.read(text)) == shortest


# --- Fitted to models ------------------------------------------------------------------------------------


@given(legal())
def test_cuts_and_layouts_are_one_another(layout: Layout) -> None:
    layers, mtp = sum(map(len, layout.stages)), layout.count(M)
    if () in layout.stages:
        with pytest.raises(
            ConfigError, match=rf"stage {layout.stages.index(())} is empty, and here each stage"
        ):
            layout.cuts(layers, mtp=mtp)
        return
    cuts = layout.cuts(layers, mtp=mtp, stages=len(layout.stages))
    assert explicit(cuts, layers, len(layout.stages)) == cuts
    assert Layout.of_cuts(cuts, layers, mtp) == layout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "Ett|tt|tL",
            "has 5 transformer layers (t), expected 6: the model has 8 layers with embedding and head; ",
        ),
        ("Ett|tt|ttmL", "has 1 MTP layer (m), expected none, as the model has none; "),
        ("Ett|ttttL", "has 2 stages, expected 3; counterflow layout 'Ett|t*4,L' --stages 3 re-derives it"),
        ("Et*6||L", "stage 1 is empty, and here each stage has one layer or more; "),
        ("tEt|tt|ttL", "expected the embedding (E) as the first layer, got t; the embedding is in stage 0"),
        ("Et|tt|tLtt", "expected the loss (L) as the last layer, got t; the loss is in stage 2"),
        ("tt|tt|ttL", "expected one embedding (E) as the first layer, got 0"),
        ("Ett|ttL|ttL", "expected one loss (L) as the last layer, got 2"),
        ("Ett|mtt|ttL", "expected MTP layers (m) after all transformer layers (t), got t after m in stage 1"),
    ],
)
def test_a_layout_of_another_model_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        explicit(text, layers=8, stages=3)
    assert str(error.value).startswith(f"layout '{Layout.read(text)}': ")
    assert "\n" not in str(error.value)


def test_mtp_layers_of_a_model() -> None:
    assert Layout.read("Ett|tt|m|L").cuts(7, mtp=1) == (3, 5, 6)
    with pytest.raises(ConfigError, match=r"has 1 MTP layer \(m\), expected the model's 2; "):
        Layout.read("Ett|tt|m|L").cuts(8, mtp=2)


# --- Re-derived ------------------------------------------------------------------------------------------


@given(legal(), st.integers(1, 6), st.integers(1, 3), st.integers(0, 60))
def test_a_layout_is_rederived(layout: Layout, pp: int, vpp: int, more: int) -> None:
    layers = layout.count(T) + more
    try:
        found = rederive(layout, layers=max(layers, 1), pp=pp, vpp=vpp)
    except ConfigError as error:
        told = str(error)
        assert re.fullmatch(r"layers=\d+: leaves \d+ of \d+ stages empty; give more layers or .*", told)
        return
    new = found.layout
    new.refuse_misplaced()
    assert len(new.stages) == pp * vpp
    assert (new.count(T), new.count(M)) == (max(layers, 1), layout.count(M))
    if not found.changed:
        return
    counts = [stage.count(T) for stage in new.stages if {*stage} == {T}]
    assert not counts or max(counts) - min(counts) <= 1
    assert counts == sorted(counts)  # later stages have more
    if pp * vpp > 1 and counts:
        loads = [new.stages[0].count(T) + found.embedding, *counts]
        assert counts[-1] <= min(loads) + 1
        assert new.stages[0].count(T) == 0 or loads[0] <= min(loads) + 1
    again = rederive(new, layers=layers or None, pp=pp, vpp=vpp)
    assert not again.changed


@given(legal())
def test_a_layout_that_fits_stays(layout: Layout) -> None:
    found = rederive(layout, layers=layout.count(T) or None, mtp=layout.count(M), stages=len(layout.stages))
    assert found.layout == layout
    assert not found.changed


@pytest.mark.parametrize(
    ("text", "changed", "layout", "sizes"),
    [
        ("Et*3|(tt|)*29,m|L", {}, "Et*3|(tt|)*29,m|L", (32, 1)),
        ("Et*3|(tt|)*29,m|L", {"pp": 16}, "Et*3|(tt|)*29,m|L", (16, 2)),
        ("Et*3|(tt|)*29,m|L", {"stages": 32, "vpp": 4}, "Et*3|(tt|)*29,m|L", (8, 4)),
        ("Et*3|(tt|)*29,m|L", {"layers": 48, "pp": 8, "vpp": 2}, "Et*4|(t*3|)*9,(t*4|)*4,tm|L", (8, 2)),
        ("Et*3|(tt|)*29,m|L", {"layers": 123}, "Et*5|(t*4|)*29,ttm|L", (32, 1)),
        ("Et*3|(tt|)*29,m|L", {"mtp": 0}, "Ett|t|(tt|)*29,L", (32, 1)),
        ("Et*3|(tt|)*29,m|L", {"mtp": 2, "stages": 32}, "Et*3|(tt|)*29,mm|L", (32, 1)),
        ("Et*3|(tt|)*29,m|L", {"stages": 2}, "Et*33|t*28,mL", (2, 1)),
        ("Et*3|(tt|)*29,m|L", {"stages": 1}, "Et*61,mL", (1, 1)),
        ("Et*3|t*4|t*4|t*3,L", {"mtp": 1, "layers": 13}, "Et*3|t*4|t*4|ttmL", (4, 1)),
        ("Et*8,L", {"stages": 4}, "Ett|tt|tt|ttL", (4, 1)),
    ],
)
def test_what_is_special_is_kept(
    text: str, changed: dict[str, int], layout: str, sizes: tuple[int, int]
) -> None:
    found = rederive(Layout.read(text), **changed)
    assert (str(found.layout), (found.pp, found.vpp)) == (layout, sizes)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"pp": 5}, "pp=5: 32 stages do not divide by it; give pp and vpp, which make pp * vpp stages"),
        ({"vpp": 2}, "vpp=2: says nothing without the number of ranks; give pp, too"),
        ({"stages": 9, "vpp": 2}, "vpp=2: 9 stages do not divide by it; give pp and vpp, "),
        ({"stages": 9, "pp": 2, "vpp": 2}, "stages=9: expected pp * vpp = 4; leave one of them out"),
        ({"pp": 0}, "pp=0: must be 1 to 10,000"),
        ({"pp": 1000, "vpp": 1000}, "pp=1000, vpp=1000: 1,000,000 stages, at most 10,000 are made"),
        ({"layers": 0}, "layers=0: must be 1 to 10,000"),
        ({"mtp": -1}, "mtp=-1: must be 0 to 10,000"),
        ({"layers": 5}, "layers=5: leaves 25 of 32 stages empty; give more layers or fewer stages"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changed: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}"):
        rederive(Layout.read("Et*3|(tt|)*29,m|L"), **changed)


def test_mtp_layers_in_several_stages_keep_their_number() -> None:
    layout = Layout.read("E|(t|)*11m|m|m|L")
    with pytest.raises(ConfigError, match=r"^mtp=1: the 3 MTP layers lie in 3 stages; put them in one stage"):
        rederive(layout, mtp=1)
    assert str(rederive(layout, layers=22).layout) == "E|(tt|)*11,m|m|m|L"


def test_ranks_are_numbered_as_megatron_does() -> None:
    found = rederive(Layout.read("Et*3|(tt|)*29,m|L"), pp=16)
    assert [found.chunk(rank, 1) for rank in (0, 13, 14, 15)] == [(T, T), (T, T), (M,), (L,)]
    (where,) = looped(16, chunks=2).pipes_stages
    for rank in range(16):
        held = [stage for stage, worker in enumerate(where) if worker == rank]
        assert [found.chunk(rank, number) for number in range(2)] == [found.layout.stages[s] for s in held]


# --- Public ones -----------------------------------------------------------------------------------------


def test_twenty_public_layouts_go_round() -> None:
    assert len({case["layout"] for case in PUBLIC}) >= 20
    assert all(case["source"].startswith("https://github.com/") for case in PUBLIC)
    for case in PUBLIC:
        layout = Layout.read(case["layout"])
        assert stages_of(layout) == in_megatron(case["layout"]), case
        assert Layout.read(str(layout)) == layout, case
        assert in_megatron(str(layout)) == in_megatron(case["layout"]), case
        assert layout.count(T) == case.get("layers", layout.count(T)), case
        assert layout.count(M) == case.get("mtp", 0), case
        if "vpp" in case:
            assert len(layout.stages) == case["pp"] * case["vpp"], case


@pytest.mark.parametrize("case", STALE, ids=lambda case: case["what"][:40])
def test_layouts_that_went_stale(case: dict[str, Any]) -> None:
    stale = Layout.read(case["stale"])
    assert str(stale) == case["stale"]
    layers = case.get("layers", stale.count(T))
    with pytest.raises(ConfigError, match=r"has \d+ (transformer layers \(t\)|stages), expected \d+"):
        stale.cuts(layers + stale.count(M) + 2, mtp=stale.count(M), stages=case["pp"] * case["vpp"])
    found = rederive(stale, layers=layers, pp=case["pp"], vpp=case["vpp"])
    assert str(found.layout) == case["layout"]
    assert (found.layout.count(T), len(found.layout.stages)) == (layers, case["pp"] * case["vpp"])
    if "there" in case:
        there = Layout.read(case["there"])
        assert (there.count(T), there.count(M), len(there.stages)) == (
            layers,
            found.layout.count(M),
            len(found.layout.stages),
        )


def test_ten_went_stale_and_seven_come_to_what_their_projects_have() -> None:
    assert len(STALE) >= 10
    same = [case for case in STALE if case.get("there") == case["layout"]]
    assert len(same) == 7
