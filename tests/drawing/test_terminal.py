"""The text of the terminal's timeline, letter by letter."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from counterflow.drawing import draw_terminal, palette
from counterflow.drawing.terminal import common_slot
from counterflow.schedule import schemes
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.registry import build
from counterflow.simulation import ByteCosts, Costs, Simulation, simulate


def simulated(name: str, costs: Costs | None = None, **options: OptionValue) -> Simulation:
    return simulate(build(name, options), costs)


def shown(
    result: Simulation,
    width: int = 80,
    *,
    compare: Simulation | None = None,
    memory: bool = False,
    encoding: str = "utf-8",
) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=file, width=width, color_system=None)
    draw_terminal(result, console, compare=compare, memory=memory)
    file.seek(0)
    return file.read()


def coloured(result: Simulation, width: int = 80) -> str:
    file = io.StringIO()
    draw_terminal(result, Console(file=file, width=width, force_terminal=True, color_system="truecolor"))
    return file.getvalue()


def test_chimera() -> None:
    assert (
        shown(simulated("chimera", stages=4, micro_batches=4))
        == """\
chimera  D=4, N=4, direct
makespan 16 F, bubble ratio 25 %, peak 4 activations
P0 0 1 . 2 c c 3 d d . a a . . b b
P1 . 0 2 1 3 . c c a a d d b b . .
P2 . 2 0 3 1 . a a c c b b d d . .
P3 2 3 . 0 a a 1 b b . c c . . d d
F  0         5         10        15
bubbles 25 %: warm-up 3.12 %, dependency 15.6 %, drain 6.25 %
1 forward of micro-batch 1, b its backward, . bubble, P0 worker 0
"""
    )


def test_halves_and_syncs() -> None:
    result = simulated(
        "chimera", Costs(sync=3, sync_mode="end"), stages=2, micro_batches=2, concat="backward-halving"
    )
    assert (
        shown(result, width=120)
        == """\
chimera  D=2, N=2, backward-halving
makespan 12 F, bubble ratio 50 %, peak 2 activations
P0 0  1  b1 a1 b2 a2 .  .  .  .  .  .
                     =1========0=======
P1 1  0  a1 b1 a2 b2 .  .  .  .  .  .
                     =1========0=======
F  0     2     4     6     8     10    12
bubbles 50 %: drain 50 %
1 forward of micro-batch 1, b its backward, b1 and b2 its halves, . bubble, =1= a gradient sync of stage 1, \
P0 worker 0
"""
    )


def test_input_gradients_and_weight_gradients() -> None:
    assert (
        shown(simulate(schemes.zb_h1(stages=2, micro_batches=3)), width=100)
        == """\
zb-h1  D=2, N=3
makespan 10 F, bubble ratio 10 %, peak 2 activations
P0 0 1 . a A 2 b B c C
P1 . 0 a 1 b A 2 c B C
F  0         5         10
bubbles 10 %: warm-up 5 %, dependency 5 %
1 forward of micro-batch 1, b its input gradient, B its weight gradients, . bubble, P0 worker 0
"""
    )


def test_input_gradients_beside_backwards() -> None:
    both = simulate(schemes.dualpipe_v(workers=2, micro_batches=4))
    wide, narrow = shown(both, width=120).splitlines(), shown(both, width=30).splitlines()
    words = "1 forward of micro-batch 1, b its backward, b' its input gradient, B its weight gradients"
    assert wide[-1].startswith(words)
    assert {"a", "a'", "A"} <= set(wide[2].split())
    assert "b its backward or input gradient, B its weight gradients" in " ".join(" ".join(narrow).split())
    dark = palette.HUES[0].backward
    red, green, blue = (int(dark[i : i + 2], 16) for i in (1, 3, 5))
    assert re.search(rf"\[4;38;2;255;255;255;48;2;{red};{green};{blue}m", coloured(both))
    assert "\x1b[4;" not in coloured(simulate(schemes.zb_h1(stages=2, micro_batches=3)))


def test_recomputations() -> None:
    result = simulated("dapple", Costs(p2p=1.0, recompute="stage", relative=True), stages=2, micro_batches=2)
    assert (
        shown(result, width=120)
        == """\
1F1B (dapple)  D=2, N=2, recompute stage
makespan 13 F, bubble ratio 38.5 %, peak 2 activations
P0 0  1  0' .  .  .  .  a  a  1' .  b  b
P1 .  .  0  0' a  a  1  1' b  b  .  .  .
F  0     2     4     6     8     10    12
bubbles 38.5 %: warm-up 7.69 %, dependency 11.5 %, message 7.69 %, drain 11.5 %
1 forward of micro-batch 1, 1' its recomputation, b its backward, . bubble, P0 worker 0
"""
    )
    narrow = shown(result, width=20).splitlines()
    assert any(line.startswith("P0 01'....aa'.bb") for line in narrow)
    assert "' its recomputation" in " ".join(" ".join(narrow).split())
    assert "\x1b[4;" in coloured(result)


def test_doubled_forwards_share_their_slots_when_numbers_are_cut() -> None:
    result = simulated("chimera", Costs(1, 1), stages=2, micro_batches=4, concat="forward-doubling")
    wide, narrow = shown(result).splitlines(), shown(result, width=30).splitlines()
    assert wide[2].startswith("P0 0,1 0,1 2,3 2,3 c   a   d   b")
    narrow = [line for line in narrow if line.startswith("P0")]
    assert narrow[0].startswith("P0 0  1  2  3  c  a  d  b")


def test_two_schedules_on_one_axis_with_memory() -> None:
    costs = Costs(memory=ByteCosts(activations=2**30))
    text = shown(
        simulated("dapple", costs, stages=2, micro_batches=2),
        width=66,
        compare=simulated("gpipe", costs, stages=2, micro_batches=1),
        memory=True,
    )
    assert (
        text
        == """\
1F1B (dapple)  D=2, N=2
makespan 9 F, bubble ratio 33.3 %, peak 2 GiB
P0 0 1 . . a a . b b
P1 . 0 a a 1 b b . .
F  0         5
bubbles 33.3 %: warm-up 5.56 %, dependency 16.7 %, drain 11.1 %
memory of each worker, full height is 2 GiB; peaks at the right
P0 ▄▄██████████▄▄▄▄▄▄ 2 GiB
P1   ▄▄▄▄▄▄▄▄▄▄▄▄     1 GiB

gpipe  D=2, N=1
makespan 6 F, bubble ratio 50 %, peak 1 GiB
P0 0 . . . a a
P1 . 0 a a . .
F  0         5
bubbles 50 %: warm-up 8.33 %, dependency 25 %, drain 16.7 %
memory of each worker, full height is 2 GiB; peaks at the right
P0 ▄▄▄▄▄▄▄▄▄▄▄▄       1 GiB
P1   ▄▄▄▄▄▄           1 GiB
1 forward of micro-batch 1, b its backward, . bubble, P0 worker 0
"""
    )


def test_console_that_knows_only_ascii() -> None:
    text = shown(simulated("dapple", stages=2, micro_batches=2), memory=True, encoding="ascii")
    assert "P0 449999999999444444 2" in text


def test_too_long_a_timeline_is_scaled_and_says_so() -> None:
    result = simulated("chimera", stages=32, micro_batches=128)
    lines = shown(result, width=100).splitlines()
    rows = [line for line in lines if line.startswith("P")]
    assert len(rows) == 32
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1] == "scaled to fit: a character is 5.562 F and shows what fills most of it"
    # The drain of worker 15 is long: seen as dots up to the end.
    assert rows[15].endswith("....")


def test_uneven_costs_are_scaled() -> None:
    result = simulated("dapple", Costs(forward=1.0, backward=2.0001234), stages=2, micro_batches=4)
    assert "scaled to fit" in shown(result)


def test_colour_tells_direction_and_lane() -> None:
    text = coloured(simulated("chimera", stages=2, micro_batches=2))
    for hue in palette.HUES[:2]:
        for colour in hue.shades[:2]:
            red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
            assert f"48;2;{red};{green};{blue}m" in text
    assert "down pipe" in text
    assert "up pipe" in text


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = coloured(simulated("chimera", stages=2, micro_batches=2))
    assert "48;2;" not in text
    assert "P0 0 1 b b a a" in text


def test_same_text_each_time() -> None:
    result = simulated("hanayo", workers=4, micro_batches=4, waves=2)
    assert coloured(result) == coloured(result)


def test_slot_of_times_that_are_sums_of_fractions() -> None:
    times = [0.0]
    for _ in range(200):
        times.append(times[-1] + 0.1)
    slot = common_slot(times, times[-1])
    assert slot == pytest.approx(0.1)
    assert common_slot([0.0], 1.0) is None


def test_slices_are_numbered_in_forwards_and_backwards() -> None:
    drawn = shown(simulated("dapple", stages=1, micro_batches=1, slices=2))
    assert "P0 0.0 0.1 a.1 a.1 a.0 a.0" in drawn
