from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import counterflow as cf
from counterflow.cli.options.flags import SchemeOptions
from counterflow.schedule import registry
from counterflow.schedule.registry import SCHEMES

from ..conftest import Run

KEYS = [
    "format",
    "scheme",
    "options",
    "workers",
    "stages",
    "pipes",
    "micro_batches",
    "costs",
    "time_unit",
    "makespan",
    "steady_step",
    "steady_step_clipped",
    "bubble_ratio",
    "busy",
    "idle",
    "bubbles",
    "spans",
    "peak_activations",
    "weight_copies",
    "steady_bubble_ratio",
]


# Warm-up, dependency, drain of each worker: 12 in all.
CAUSES = [(w, 12.0 - 3 * w, 2 * w) for w in (0.0, 1.0, 2.0, 3.0, 3.0, 2.0, 1.0, 0.0)]


def test_json_is_as_promised(run: Run) -> None:
    shown = run("simulate chimera --stages 8 --micro-batches 8 --json").json
    assert list(shown) == KEYS
    assert shown == {
        "format": 1,
        "scheme": "chimera",
        "options": {"stages": 8, "micro_batches": 8, "pairs": 1, "concat": "direct"},
        "workers": 8,
        "stages": 8,
        "pipes": 2,
        "micro_batches": 8,
        "costs": {"forward": 1.0, "backward": 2.0, "p2p": 0.0},
        "time_unit": "F",
        "makespan": 36.0,
        "steady_step": 36.0,
        "steady_step_clipped": 36.0,
        "bubble_ratio": 12 / 36,
        "busy": [24.0] * 8,
        "idle": [12.0] * 8,
        "bubbles": [{"warm_up": a, "dependency": b, "message": 0.0, "drain": c} for a, b, c in CAUSES],
        "spans": [36.0 - a - c for a, _, c in CAUSES],
        "peak_activations": [5, 6, 7, 8, 8, 7, 6, 5],
        "weight_copies": [2] * 8,
        "steady_bubble_ratio": None,
    }


def test_a_note_names_settings_that_are_shorter_in_the_same_memory(run: Run) -> None:
    line = "simulate mixpipe --stages 8 --micro-batches 8 --json --injected"
    assert run(f"{line} 2 --early-forwards 2").err == (
        "Note: --injected 4 --early-forwards 0 takes 47 instead of 50 in the same memory.\n"
    )
    assert run(f"{line} 4").err == ""
    assert run(f"{line} 2 --early-forwards 1").err == (
        "Note: --asymmetric takes 58 instead of 63 in the same memory.\n"
    )
    longer = run(
        "simulate mixpipe --stages 10 --micro-batches 40 --injected 4 --early-forwards 1 --asymmetric"
    )
    assert longer.err == "Note: --no-asymmetric takes 235 instead of 236 in the same memory.\n"


def test_formulas_of_papers_beside_the_simulation(run: Run) -> None:
    line = "simulate chimera --stages 4 --micro-batches 8 --sync 6 --formulas"
    printed = run(line).out
    assert re.search(r"Chimera, equation 1 +makespan +40 +40 +\+0.0%", printed)
    assert "Chimera, equation 1, makespan: (F + C)·C_f + (B + C)·C_b + max Comm_unoverlapped\n" in printed
    assert "  assumes: gradients are summed in no time; here in up to 6\n" in printed
    shown = run(f"{line} --json").json
    assert [*shown] == [*KEYS, "formulas"]
    assert shown["formulas"][0] == {
        "source": "Chimera, equation 1",
        "quantity": "makespan",
        "formula": "(F + C)·C_f + (B + C)·C_b + max Comm_unoverlapped",
        "value": 40.0,
        "simulated": 40.0,
        "difference": 0.0,
        "unmet": [],
    }
    none = run("simulate zb-h1 --stages 4 --micro-batches 4 --formulas --json")
    assert none.json["formulas"] == []
    assert none.err == (
        "Note: no formula of Chimera, MixPipe, Hanayo or WPipe applies to zb-h1(stages=4, micro_batches=4).\n"
    )


def test_timeline_only_on_request(run: Run) -> None:
    shown = run("simulate dapple --stages 2 --micro-batches 1 --json --timeline").json
    assert list(shown) == [*KEYS, "ops"]
    columns = "worker", "kind", "pipe", "stage", "micro_batches", "start", "end"
    assert [[op[key] for key in columns] for op in shown["ops"]] == [
        [0, "F", 0, 0, [0], 0.0, 1.0],
        [0, "B", 0, 0, [0], 4.0, 6.0],
        [1, "F", 0, 1, [0], 1.0, 2.0],
        [1, "B", 0, 1, [0], 2.0, 4.0],
    ]


def test_doubled_forwards_and_halves(run: Run) -> None:
    doubled = run(
        "simulate chimera --stages 2 --micro-batches 4 --concat forward-doubling --json --timeline"
    ).json
    first = doubled["ops"][0]
    assert (first["micro_batches"], first["start"], first["end"]) == ([0, 1], 0.0, 2.0)
    halved = run("simulate chimera --stages 2 --micro-batches 4 --concat backward-halving --json").json
    assert all(isinstance(peak, int | float) for peak in halved["peak_activations"])


def test_costs_are_shown_when_given(run: Run) -> None:
    shown = run(
        "simulate dapple --stages 2 --micro-batches 2 --forward 1,2 --backward 3 --p2p 0.5 --no-overlap "
        "--sync 1 --sync-mode end --replicas 2 --recompute stage --json --timeline"
    ).json
    assert shown["costs"] == {
        "forward": [1.0, 2.0],
        "backward": 3.0,
        "p2p": 0.5,
        "overlap": False,
        "sync": 1.0,
        "sync_mode": "end",
        "replicas": 2,
        "recompute": "stage",
    }
    schedule = cf.schemes.dapple(stages=2, micro_batches=2)
    costs = cf.Costs(
        forward=(1, 2),
        backward=3,
        p2p=0.5,
        overlap=False,
        sync=1,
        sync_mode="end",
        replicas=2,
        recompute="stage",
    )
    assert shown["makespan"] == cf.simulate(schedule, costs).makespan
    syncs = shown["gradient_syncs"]
    assert [(sync["worker"], sync["stage"], sync["period"]) for sync in syncs] == [(1, 1, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("1e3", 1000),
        ("7B", 7),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5 MiB", 3 << 19),
        ("1GB", 10**9),
        ("1GiB", 1 << 30),
        ("3gib", 3 << 30),
    ],
)
def test_bytes(run: Run, text: str, expected: int) -> None:
    shown = run("simulate gems --stages 2 --micro-batches 1 --json --activation-bytes", text).json
    assert shown["costs"]["activation_bytes"] == expected
    # One micro-batch on one pipe: each worker stashes it once.
    assert shown["peak_bytes"] == [expected, expected]


def test_byte_costs_of_each_stage(run: Run) -> None:
    shown = run(
        "simulate dapple --stages 2 --micro-batches 4 --json --weight-bytes 10,20 --gradient-bytes 1 "
        "--optimizer-bytes 100 --activation-bytes 30000 --input-bytes 10000 --layers 2 --recompute layer"
    ).json
    # Weights, gradients, optimiser; stashed inputs of two layers; what one of them saves beyond its input.
    assert shown["peak_bytes"] == [111 + 2 * 20000 + 5000, 121 + 20000 + 5000]


def test_table_for_people(run: Run) -> None:
    answer = run("simulate dapple --stages 2 --micro-batches 2 --weight-bytes 1GiB,2GiB")
    assert (answer.code, answer.err) == (0, "")
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines[:3] == [
        "1F1B: dapple(stages=2, micro_batches=2)",
        "2 workers · 2 stages · 1 pipe · 2 micro-batches",
        "forward 1 F · backward 2 F · message 0 F · weights 1 GiB, 2 GiB",
    ]
    assert "worker busy F idle F bubble peak activations weight copies peak memory" in lines
    assert "0 6 3 33.3% 2 1 2 GiB" in lines
    assert "1 6 3 33.3% 1 1 4 GiB" in lines
    assert "makespan 9 F" in lines
    assert "bubble ratio 33.33%" in lines


def test_a_backward_that_no_op_takes_is_not_told(run: Run) -> None:
    halves = "--micro-batches 4 --input-gradient 4 --weight-gradient 2"
    assert "backward" not in run(f"simulate v-min --workers 2 {halves}").out
    assert "backward 2 F" in run("simulate v-min --workers 2 --micro-batches 4 --input-gradient 1.5").out
    assert "backward 2 F" in run(f"simulate dualpipe-v --workers 2 {halves}").out  # some backwards are whole


def test_alike_workers_of_a_wide_schedule_share_a_row(run: Run) -> None:
    assert "0–63" in run("simulate gpipe --stages 64 --micro-batches 4").out


def test_timeline_for_people(run: Run) -> None:
    out = run("simulate chimera --stages 2 --micro-batches 4 --concat backward-halving --timeline").out
    assert "(part 2 of 2)" in out


def test_steady_state(run: Run) -> None:
    answer = run("simulate pipedream --stages 4")
    assert "steady bubble ratio  0.00%" in answer.out
    assert run("simulate pipedream --stages 4 --json").json["steady_bubble_ratio"] == 0.0


@pytest.mark.parametrize(
    "scheme",
    [
        "pipedream --stages 3",
        "pipedream-2bw --stages 3 --micro-batches 4",
        "wpipe --workers 3 --micro-batches 4",
    ],
)
def test_too_few_periods_for_a_steady_state(run: Run, scheme: str) -> None:
    answer = run(f"simulate {scheme} --periods 1")
    assert "no steady part in 1 period; simulate " in answer.out
    needed = int(answer.out.split("(--periods ")[1].split(")")[0])
    assert run(f"simulate {scheme} --json --periods {needed}").json["steady_bubble_ratio"] == 0.0
    fewer = run(f"simulate {scheme} --json --periods {needed - 1}").json
    assert fewer["steady_bubble_ratio"] is None


def test_every_option_of_every_scheme_is_a_flag() -> None:
    flags = SchemeOptions.flags()
    assert {o.name for scheme in SCHEMES.values() for o in scheme.options} | {"slices"} == set(flags)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("gpipe --stages 2 --micro-batches 2 --groups 2", {"groups": 2}),
        ("1f1b --stages 2 --micro-batches 2", {"stages": 2}),
        ("interleaved --workers 2 --micro-batches 2 --chunks 3", {"chunks": 3}),
        ("gems --stages 2 --micro-batches 3", {"micro_batches": 3}),
        ("chimera --stages 4 --micro-batches 4 --pairs 2", {"pairs": 2}),
        ("mixpipe --stages 4 --micro-batches 4 --injected 2 --early-forwards 1", {"injected": 2}),
        ("mixpipe --stages 4 --micro-batches 8 --injected max", {"injected": "max"}),
        ("hanayo --workers 2 --micro-batches 2 --waves 2", {"waves": 2}),
        ("pipedream --stages 2 --periods 4", {"periods": 4}),
        ("pipedream-2bw --stages 2 --micro-batches 2 --periods 4", {"periods": 4}),
        ("wpipe --workers 2 --micro-batches 2 --periods 4", {"periods": 4}),
    ],
)
def test_every_scheme(run: Run, line: str, options: dict[str, Any]) -> None:
    shown = run(f"simulate {line} --json").json
    assert shown["options"].items() >= options.items()


Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chimera --stages 7 --micro-batches 8", "Error: --stages 7: two directions need an even"),
        ("chimera --stages 8 --micro-batches 8 --pairs 3", "Error: --pairs 3: the number of pairs"),
        ("chimera --stages 8 --micro-batches 0", "Error: --micro-batches 0: must be 1 or more"),
        ("wpipe --workers 4 --micro-batches 3", "Error: --micro-batches 3"),
        ("mixpipe --stages 4 --micro-batches 4 --injected 3", "Error: --injected 3"),
        ("mixpipe --stages 4 --micro-batches 4 --injected all", "Error: --injected 'all': must be a"),
        ("dapple --waves 2", "Error: dapple has no --waves; its options: --stages, --micro-batches, --split"),
        ("dapple --waves 2 --pairs 1", "Error: dapple has no --pairs and no --waves; its options"),
        ("hanayo --stages 4", "Error: hanayo needs --micro-batches\n  --micro-batches  N: micro-batches"),
        (
            "hanayo --stages 5 --micro-batches 4",
            "Error: --stages 5: hanayo has 2 stages on each of its workers with these options",
        ),
        ("hanayo --stages 0 --micro-batches 4", "Error: --stages 0: for hanayo that is --workers 0: must be"),
        ("chimera --workers 3 --micro-batches 4", "Error: --workers 3: for chimera that is --stages 3: two"),
        (
            "chimera --workers 4 --stages 2 --micro-batches 4",
            "Error: --workers 4: chimera with --stages 2 has 2 workers; use only one of them",
        ),
        ("dapple --stages 4", "Error: dapple needs --micro-batches\n  --micro-batches  N: micro-batches"),
        ("dapple", "Error: dapple needs --stages and --micro-batches\n  --stages         depth D"),
        ("chimra", "Error: unknown scheme 'chimra'; did you mean 'chimera'? Known: chimera, 1F1B (dapple),"),
        ("1f1b --stages 2 --micro-batches 2 --forward 1,x", "Error: --forward 1,x: cannot read 'x'"),
        ("dapple --stages 2 --micro-batches 2 --forward 1,2,3", "Error: --forward: 3 numbers for 2"),
        ("dapple --stages 2 --micro-batches 2 --forward nan", "Error: --forward nan: must be a finite"),
        ("dapple --stages 2 --micro-batches 2 --p2p -1", "Error: --p2p -1.0: must be a finite number"),
        ("dapple --stages 2 --micro-batches 2 --replicas 0", "Error: --replicas 0: must be 1 or more"),
        ("dapple --stages 2 --micro-batches 2 --weight-bytes 2XB", "Error: --weight-bytes 2XB: cannot"),
        ("dapple --stages 2 --micro-batches 2 --weight-bytes -1", "Error: --weight-bytes -1: cannot"),
        ("dapple --stages 2 --micro-batches 2 --weight-bytes 1,2,3", "Error: --weight-bytes: 3 numbers"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_requests(refused: Refused, line: str, message: str, as_json: bool) -> None:
    assert refused(f"simulate {line}{' --json' * as_json}").startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("simulate dapple --stage 2", "No such option: --stage"),
        ("simulate dapple --stages two", "Invalid value for '--stages'"),
        ("simulate dapple --recompute all", "Invalid value for '--recompute'"),
        ("simulate chimera --concat doubling", "Invalid value for '--concat'"),
        ("simulate", "Missing argument 'SCHEME|FILE'"),
        ("simulate dapple gpipe", "unexpected extra argument"),
    ],
)
def test_wrong_usage(refused: Refused, line: str, message: str) -> None:
    shown = refused(line)
    assert message in shown
    assert "Try 'counterflow simulate --help' for help." in shown


def test_sync_settings_without_a_sync_are_pointed_out(run: Run) -> None:
    answer = run("simulate dapple --stages 2 --micro-batches 2 --replicas 2 --json")
    assert answer.code == 0
    assert answer.err.startswith("Note: --sync-mode, --sync-slowdown and --replicas change nothing")
    assert list(answer.json) == KEYS


def test_ops_and_messages_as_objects(run: Run) -> None:
    line = "simulate chimera --stages 2 --micro-batches 4 --concat backward-halving --p2p 0.5"
    shown = run(f"{line} --json --timeline --messages").json
    ops = shown["ops"]
    assert list(ops[0]) == [
        *("kind", "stage", "pipe", "micro_batches", "part", "parts", "version", "worker", "start", "end"),
    ]
    assert {op["part"] for op in ops if op["parts"] == 2} == {0, 1}
    assert len({tuple(map(str, op.values())) for op in ops}) == len(ops)
    first = shown["messages"][0]
    assert list(first) == ["sender", "receiver", "start", "end", "maker", "taker"]
    assert first["end"] - first["start"] == 0.5
    assert first["maker"]["stage"] + 1 == first["taker"]["stage"]
    assert shown["time_unit"] == "F"


def test_new_costs(run: Run) -> None:
    costs = "--input-gradient 1,2 --weight-gradient 0.5 --p2p 3 --link infinite --agreement 4"
    shown = run(f"simulate gpipe --stages 2 --micro-batches 8 --json {costs}").json
    assert shown["costs"] == {
        "forward": 1.0,
        "backward": 2.0,
        "p2p": 3.0,
        "input_gradient": [1.0, 2.0],
        "weight_gradient": 0.5,
        "link": "infinite",
        "agreement": 4.0,
    }
    schedule = cf.schemes.gpipe(2, 8)
    assert shown["makespan"] == cf.simulate(schedule, cf.Costs(p2p=3, link="infinite", agreement=4)).makespan
    assert shown["makespan"] < cf.simulate(schedule, cf.Costs(p2p=3, agreement=4)).makespan


def test_units_and_causes_for_people(run: Run) -> None:
    line = "dapple --stages 2 --micro-batches 2"
    causes = "warm-up 5.56%, dependency 16.67%, drain 11.11%"
    out = run(f"simulate {line} --messages").out
    assert "makespan          9 F" in out
    assert causes in out
    assert " s\n" not in out
    assert "F0.0  F0.1" in " ".join(out.split()).replace(" F0.1", "  F0.1")
    shown = run(f"show {line}").out
    assert "makespan 9 F" in shown
    assert "bubbles 33.3 %: warm-up 5.56 %, dependency 16.7 %, drain 11.1 %" in shown
    seconds = run(f"show {line} --forward 2 --backward 2").out
    assert "makespan 12 s" in seconds
    assert " s\n" not in run(f"simulate {line} --p2p 0.5").out
    assert run(f"simulate {line} --forward 0.5").out.count(" s") > 3


@pytest.mark.parametrize("name", registry.SCHEMES)
def test_workers_and_stages_stand_for_each_other(run: Run, name: str) -> None:
    scheme = registry.SCHEMES[name]
    rest = " --micro-batches 8" if scheme.option("micro_batches") else ""
    shown = run(f"simulate {name} --{scheme.depth} 4{rest} --json").json
    depth = "workers" if scheme.depth == "stages" else "stages"
    assert run(f"simulate {name} --{depth} {shown[depth]}{rest} --json").json == shown
    both = f"simulate {name} --workers {shown['workers']} --stages {shown['stages']}{rest} --json"
    assert run(both).json == shown


def test_stages_of_waves_and_chunks(run: Run) -> None:
    line = "--micro-batches 4 --json"
    assert run(f"simulate hanayo --stages 16 --waves 2 {line}").json["options"]["workers"] == 4
    assert run(f"simulate interleaved --stages 12 --chunks 3 {line}").json["options"]["workers"] == 4


def test_memory_between_input_and_weight_gradients(run: Run) -> None:
    line = "simulate zb-h1 --stages 2 --micro-batches 4 --activation-bytes 100"
    plain, with_weights = run(f"{line} --json"), run(f"{line} --kept-for-weights 10 --json")
    assert with_weights.json["costs"]["kept_for_weights"] == 10
    memory = cf.ByteCosts(activations=100, kept_for_weights=10)
    expected = cf.simulate(cf.schemes.zb_h1(2, 4), cf.Costs(memory=memory)).memory
    assert expected is not None
    assert with_weights.json["peak_bytes"] == [use.peak for use in expected]
    assert sum(with_weights.json["peak_bytes"]) < sum(plain.json["peak_bytes"])
    assert "kept for weights 10 B" in run(f"{line} --kept-for-weights 10").out


@pytest.mark.parametrize("command", ["simulate", "show"])
def test_costs_of_a_split_backward_where_none_is_split(run: Run, command: str) -> None:
    options = "--stages 2 --micro-batches 2"
    answer = run(f"{command} dapple {options} --input-gradient 3 --kept-for-weights 1GiB")
    assert answer.code == 0
    assert answer.err == (
        "Note: --input-gradient and --kept-for-weights change nothing: no backward of dapple(stages=2, "
        "micro_batches=2) is split; add --split, or choose a scheme with a split backward.\n"
    )
    assert "change" not in run(f"{command} dapple {options} --split --input-gradient 3").err
    assert "nothing: no backward of gpipe(stages=2, micro_batches=2, groups=1) is split; choose" in (
        run(f"{command} gpipe {options} --weight-gradient 3").err
    )
    comparison = "show gpipe --stages 2 --micro-batches 2 --input-gradient 3 --compare"
    assert "change" not in run(comparison, "dapple --stages 2 --micro-batches 2 --split").err


def test_costs_of_a_workers_share_make_schemes_one_model(run: Run) -> None:
    """dapple has a stage a worker, zb-v two: without it zb-v computes a model twice as large."""
    share = run("simulate zb-v --workers 8 --micro-batches 16 --p2p 0.1 --costs-of worker")
    assert "54.8 F" in share.out
    assert "forward 0.5 F · backward 1 F · message 0.1 F · of a stage, given for a worker" in share.out
    assert share.err == ""
    stage = run("simulate zb-v --workers 8 --micro-batches 16 --p2p 0.1")
    assert "106.3 F" in stage.out
    assert "costs are those of one stage, and zb-v has 16 for 8 workers" in stage.err
    assert "--costs-of worker" in stage.err
    model = run(
        "simulate zb-v --workers 8 --micro-batches 16 --forward 8 --backward 16 --costs-of model --json"
    )
    assert model.json["costs"]["forward"] == 0.5
    assert model.json["makespan"] == 51.5


def test_costs_stage_by_stage_belong_to_one_placement(refused: Callable[..., str]) -> None:
    said = refused("simulate dapple --stages 2 --micro-batches 2 --forward 1,2 --costs-of worker")
    assert "--forward: 2 numbers are those of one placement's stages" in said


def test_copies_of_the_weights_are_copies(run: Run) -> None:
    """zb-v holds two half stages: one copy of a worker's share; chimera two."""
    for scheme, copies in (("zb-v --workers 4", "1"), ("chimera --stages 4", "2")):
        rows = run(f"simulate {scheme} --micro-batches 8").out.splitlines()
        assert [row.split()[-1] for row in rows if row.strip().startswith(("0 ", "3 "))] == [copies] * 2
