"""Programs as users write them, drawn at random: one process's numbers, or a refusal, never other numbers.

    python benchmarks/user_programs.py [--seed 0] [--cases 1000] [--first 0] [--shrink] [--keep]
    python benchmarks/user_programs.py --seed 0 --case 17        # one case, with all that it gave
    python benchmarks/user_programs.py --seed 0 --habit forward  # only cases with such a habit or feature
    python benchmarks/user_programs.py --each                    # every feature, habit and loss once, alone

A case is a model (recorded from an example, or a list of layers; with features of Python in its forward), a
loss, what the user does between two steps, and a schedule with its options, on 1 to 4 threads. It runs for a
few steps, with evaluations and predictions; losses, these and the weights at the end are compared with one
process. A case is

* ``equal``: the same numbers,
* ``refused``: a sentence of ours, at the latest in the third step after what the user did,
* ``WRONG``: other numbers in silence,
* ``internal``: an error of torch or Python that the user's program does not have on one process,
* ``hang``: it waited until a time limit (tried twice),
* ``void``: one process cannot run it either.

Of random draws it is only asked whether they still differ from step to step. ``--keep`` writes
benchmarks/results/user_programs.txt; the command fails if a case is WRONG, internal or hangs.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from kit import arguments, keep, machine_line
from torch import Tensor
from user_habits import HABITS, possible
from user_losses import LOSSES
from user_models import BLOCKS, FEATURES, SHARED
from user_runs import Case, Record, run_plain, run_staged

import counterflow as cf
from counterflow.schedule.registry import schedule_of
from counterflow.verification.reference_parts import parts_of

TIMEOUT_SECONDS = 60.0
"""How long a worker waits for another."""
PATIENCE_SECONDS = 300.0
"""How long a case may take before its process is ended."""
CASES_OF_A_PROCESS = 150

STRAIGHT = ("gpipe", "dapple", "zb-h1", "zb-h2")
SCHEMES = (
    *(
        "gpipe",
        "dapple",
        "dapple",
        "dapple",
        "chimera",
        "chimera",
        "mixpipe",
        "gems",
        "interleaved",
        "hanayo",
    ),
    *("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v", "interleaved-zb"),
    *("pipedream", "pipedream-2bw", "wpipe"),
)
"""All schemes; some are drawn more often."""

SPLITS = ("dapple", "chimera", "gems", "hanayo", "interleaved", "mixpipe")
COPIES = ("chimera", "mixpipe", "gems", "dualpipe")
SLICED = ("gpipe", "dapple", "chimera", "zb-h1", "zb-v", "hanayo", "v-half", "interleaved")


def scheme_of(draw: random.Random, name: str, *, slices: bool) -> str:
    """A scheme with its sizes, as text."""
    workers = draw.choice((2, 2, 2, 3)) if name in STRAIGHT else 2
    sizes: dict[str, Any] = {"workers": workers, "micro_batches": draw.choice((2, 4))}
    if name == "gpipe" and draw.random() < 0.2:
        sizes = {"workers": draw.choice((1, 2)), "micro_batches": draw.choice((1, 4))}
    if name in ("dualpipe", "dualpipe-v"):
        sizes["micro_batches"] = 4
    if name == "pipedream":
        sizes = {"stages": 2}
    if name == "chimera" and draw.random() < 0.4:
        sizes |= {"micro_batches": 4, "concat": draw.choice(("backward-halving", "forward-doubling"))}
    if name == "chimera" and draw.random() < 0.1:
        sizes |= {"workers": 4, "micro_batches": 4}
    if name in SPLITS and draw.random() < 0.25:
        sizes["split"] = "true"
    if slices and name in SLICED and "concat" not in sizes:
        sizes["slices"] = draw.choice((2, 3))
    return f"{name}({', '.join(f'{key}={value}' for key, value in sizes.items())})"


def drawn(seed: int, number: int) -> Case:
    """A case of a seed."""
    draw = random.Random(f"{seed} {number}")
    captured = draw.random() < 0.6
    tokens = draw.random() < 0.35
    features = draw.sample(
        [n for n in FEATURES if captured or not FEATURES[n].inline_only], draw.choice((0, 1, 1, 1, 2, 3))
    )
    blocks = draw.choices(list(BLOCKS), k=draw.choice((5, 6, 7)))
    inline: list[tuple[int, str]] = []
    for name in features:
        if captured and not FEATURES[name].block_only and draw.random() < 0.6:
            inline.append((draw.randrange(len(blocks)), name))
        else:
            blocks.insert(draw.randrange(len(blocks) + 1), name)
    shared: Any = ()
    if draw.random() < 0.08:
        free = [i for i, name in enumerate(blocks) if name in BLOCKS]
        if len(free) >= 4:
            first = draw.choice(free[:2])
            shared = (
                draw.choice(list(SHARED)),
                first,
                draw.choice([i for i in free if i > first + 1] or free[-1:]),
            )
    plain = draw.random() < 0.65
    losses = [n for n, loss in LOSSES.items() if loss.tokens == tokens]
    case = Case(
        seed,
        number,
        captured=captured,
        tokens=tokens,
        blocks=tuple(blocks),
        inline=tuple(inline),
        shared=shared,
        container=draw.choice(
            ("tensor",) * 18 + ("tuple", "dict", "list", "pair", "ordered", "mapping", "object")
        ),
        form=draw.choice(("tensor",) * 18 + ("tuple", "tuple", "dict", "dict", "list", "by mode", "object")),
        inputs=draw.choice(("tensor",) * 6 + ("tuple", "dict", "dict" if captured else "kwargs", "bounds")),
        tied=draw.random() < 0.15,
        skip=captured and draw.random() < 0.3,
        repeat=draw.random() < 0.1,
        forces=captured and not tokens and draw.random() < 0.04,
        loss=draw.choice(
            ("cross entropy", "focal") if tokens else ("mean of squares", "mean by hand", "annealed")
        )
        if plain
        else draw.choice(losses),
        model_outside=draw.random() < 0.2,
        optimizer=draw.choice(("sgd", "sgd", "momentum", "adamw")),
        samples=draw.choice((8, 8, 6, 12, 9)),
        steps=draw.choice((4, 4, 5, 6)),
        pick=draw.randrange(100),
        single=draw.random() < 0.08,
    )
    return _with_habits(_with_schedule(case, draw), draw)


def _with_schedule(case: Case, draw: random.Random) -> Case:
    sliced = case.tokens and not case.any("mixes_positions") and not case.by_unit and draw.random() < 0.15
    names = SLICED if sliced else SCHEMES
    scheme = scheme_of(draw, draw.choice(names), slices=sliced)
    schedule = schedule_of(scheme, {})
    options: dict[str, Any] = {}
    if draw.random() < 0.4:
        options["recompute"] = draw.choice(("stage", "layer"))
    if schedule.synchronous and draw.random() < 0.15:
        options["clip_norm"] = 0.3
    if schedule.synchronous and draw.random() < 0.1:
        options["barrier"] = False
    if draw.random() < 0.1:
        options["digest_every"] = 1
    if draw.random() < 0.1:
        options["dynamic_shapes"] = True
    if case.single and draw.random() < 0.5:
        options["autocast"] = torch.bfloat16
    replicas = 2 if schedule.workers == 2 and draw.random() < 0.1 else 1
    copies = replicas > 1 or scheme.startswith(COPIES)
    if copies and schedule.synchronous and "barrier" not in options and draw.random() < 0.15:
        options["zero_stage"] = 1
    looks = tuple(sorted({case.steps - 1, draw.randrange(case.steps)}))
    if case.varies:
        looks = ()
    case = replace(case, scheme=scheme, options=options, replicas=replicas, looks=looks)
    if case.varies:
        return replace(case, optimizer="still")
    halved = any(parts > 1 for parts in parts_of(schedule))
    averaged = "batch norm" in case.features or (case.shared and case.shared[0] == "batch norm")
    if ((copies or halved or "recompute" in options) and case.any("in_order") and draw.random() < 0.7) or (
        copies and averaged
    ):
        # Mostly refused there; but running statistics of copies are averaged, which one process does not do.
        return replace(case, scheme="dapple(workers=2, micro_batches=2)", replicas=1, options={})
    return case


def _with_habits(case: Case, draw: random.Random) -> Case:
    count = 0 if case.varies else draw.choice((0, 1, 1, 1, 2, 3))
    own, usual = possible(case)
    habits: list[tuple[int, str]] = []
    for _ in range(count):
        name = draw.choice(own if own and draw.random() < 0.6 else usual)
        if name not in [other for _, other in habits]:
            habits.append((draw.randrange(1, case.steps - 1), name))
    return replace(case, habits=tuple(sorted(habits)))


def each_alone(seed: int) -> list[Case]:
    """Every feature, habit, loss and shared thing in the simplest program, recorded and listed."""
    cases: list[Case] = []

    def add(**fields: Any) -> None:
        cases.append(replace(Case(seed, len(cases)), **fields))

    for captured in (True, False):
        usual = Case(seed, 0).blocks
        for name, feature in FEATURES.items():
            for habit in ["", *feature.habits]:
                looks = () if feature.varies else (1, 3)
                habits = ((2, f"{name}: {habit}"),) if habit else ()
                plain = {"looks": looks, "habits": habits, "optimizer": "still" if feature.varies else "sgd"}
                add(captured=captured, blocks=(*usual[:3], name, *usual[3:]), **plain)
                if captured:
                    add(captured=True, inline=((2, name),), **plain)
        for name, change in HABITS.items():
            case = Case(seed, 0, captured=captured, single=change.single)
            if change.needs(case):
                add(captured=captured, single=change.single, habits=((2, name),), looks=(1, 3))
            if change.needs(case) and not change.single and not captured:
                add(model_outside=True, scheme="chimera(stages=2, micro_batches=2)", habits=((2, name),))
        for kind in SHARED:
            add(captured=captured, shared=(kind, 0, 4), looks=(1, 3))
    for name, loss in LOSSES.items():
        add(tokens=loss.tokens, loss=name, looks=(1, 3))
        add(tokens=loss.tokens, loss=name, scheme="dapple(stages=2, micro_batches=4)")
    return cases


# -- judging


@dataclass(frozen=True)
class Finding:
    """What became of a case.

    Attributes:
        verdict: one of ``VERDICTS``.
        text: the difference, or the sentence.
        seconds: processor time.
        small: a smaller program that ends in the same verdict.
    """

    case: Case
    verdict: str
    text: str
    seconds: float = 0.0
    small: str = ""


VERDICTS = ("equal", "refused", "WRONG", "internal", "hang", "void")
BAD = ("WRONG", "internal", "hang")

INTERNAL = re.compile(
    r"\b(\w*(?:Error|Exception|Interrupt|Iteration|Exit)"
    r"|DataDependentOutput\w*|GuardOnDataDependent\w*|Unsupported\w*): ?"
)
OURS = ("ConfigError", "WorkerError", "ScheduleError", "UserError")


def is_internal(error: BaseException) -> bool:
    """Whether an error is not a sentence of ours."""
    if not isinstance(error, cf.CounterflowError):
        return True
    if isinstance(error, cf.ConfigError):
        return False
    if "lives on rank" in str(error):  # said of a weight that the user's own code touches elsewhere
        return False
    named = [name for name in INTERNAL.findall(str(error)) if name not in OURS]
    if "AttributeError" in named and "option" in str(error):  # of a pipeline, by name
        return False
    return bool(named)


def near(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Whether numbers or tensors are equal but for rounding."""
    a, b = (torch.as_tensor(v).detach().to(torch.float64) for v in (ours, theirs))
    if a.shape != b.shape:
        return False
    return torch.allclose(
        a,
        b,
        rtol=tolerance,
        atol=tolerance * max(1e-2, float(b.abs().max()) if b.numel() else 0),
        equal_nan=True,
    )


def differences(case: Case, plain: Record, record: Record) -> list[tuple[int, str]]:
    """Where a worker's numbers differ, by step."""
    tolerance = 5e-2 if case.lower else 1e-8
    found = [
        (step, f"loss of step {step}: {value:.8g} for {plain.losses[step]:.8g}")
        for step, value in sorted(record.losses.items())
        if step in plain.losses and not near(value, plain.losses[step], tolerance)
    ]
    for (step, kind), value in record.looks.items():
        theirs = plain.looks.get((step, kind))
        if theirs is not None and not near(value, theirs, tolerance):
            shown_ones = [
                f"{float(torch.as_tensor(v).flatten()[0]):.8g}"
                for v in (value, theirs)
                if torch.as_tensor(v).numel()
            ]
            found.append((step, f"{kind} after step {step}: {' for '.join(shown_ones)}"))
    for name, value in record.state.items():
        theirs = plain.state.get(name)
        if isinstance(theirs, Tensor) and isinstance(value, Tensor) and not near(value, theirs, tolerance):
            error = (
                float((value.double() - theirs.double()).abs().max())
                if value.shape == theirs.shape
                else math.nan
            )
            found.append((case.steps, f"{name} at the end is off by {error:.2g}"))
    return sorted(found, key=lambda each: each[0])


def judged(case: Case) -> Finding:
    """Run a case both ways and compare."""
    began = time.process_time()

    def finding(verdict: str, text: str) -> Finding:
        return Finding(case, verdict, text, time.process_time() - began)

    try:
        plain = run_plain(case)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return finding(
            "void", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:300]
        )
    records, error = run_staged(case, TIMEOUT_SECONDS)
    text = "" if error is None else f"{type(error).__name__}: {error}"
    if error is not None and re.search(r"nothing came within|did not (come|end)|timed out", text):
        return finding("hang", text)
    if error is not None and is_internal(error):
        return finding("internal", text)
    caught = [note for note in records[0].notes if note.startswith("worker") or INTERNAL.search(note)]
    if not case.synchronous and records[0].stages:
        stages = {name: stage for record in records for name, stage in record.stages.items()}
        plain = run_plain(case, stages=stages)
    if case.varies:
        same = len(records[0].losses) > 2 and len({*records[0].losses.values()}) == 1
        differ = len({*plain.losses.values()}) > 1
        if same and differ:
            return finding("WRONG", "draws are the same in every step")
        return finding("equal" if error is None else "refused", text)
    return _compared(case, plain, records, error, text, finding, caught)


def _compared(
    case: Case,
    plain: Record,
    records: list[Record],
    error: BaseException | None,
    text: str,
    finding: Any,
    caught: Any,
) -> Finding:
    del caught
    found = [d for r in records for d in differences(case, plain, r)]
    if found and not case.synchronous and LOSSES[case.loss].counted and records[0].stages:
        stages = {name: stage for record in records for name, stage in record.stages.items()}
        plain = run_plain(case, stages=stages, by_micro_batch=True)
        found = [d for r in records for d in differences(case, plain, r)]
    if any(not math.isfinite(value) for value in plain.losses.values()):
        return finding("void", "the loss of one process is not finite")
    if error is None:
        return finding("WRONG", found[0][1]) if found else finding("equal", "")
    first = min((step for step, _ in found), default=None)
    last = max(record.step for record in records)
    if first is not None and last > first + 2:
        return finding("WRONG", f"{found[0][1]}; only then {text}")
    return finding("refused", text)


# -- the smallest program with the same fault


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""
    for habit in case.habits:
        yield replace(case, habits=tuple(other for other in case.habits if other != habit))
    for each in case.inline:
        yield replace(case, inline=tuple(other for other in case.inline if other != each))
    for at, name in enumerate(case.blocks):
        if name in FEATURES:
            yield replace(case, blocks=(*case.blocks[:at], "mlp", *case.blocks[at + 1 :]))
    if case.scheme != "dapple(stages=2, micro_batches=2)":
        yield replace(case, scheme="dapple(stages=2, micro_batches=2)")
    for name in case.options:
        yield replace(case, options={n: value for n, value in case.options.items() if n != name})
    plain = Case(case.seed, case.number, tokens=case.tokens)
    usual = ("cross entropy",) if case.tokens else (plain.loss,)
    for what, values in (
        *(
            (name, (getattr(plain, name),))
            for name in ("shared", "container", "form", "inputs", "tied", "skip")
        ),
        *(
            (name, (getattr(plain, name),))
            for name in ("repeat", "forces", "replicas", "model_outside", "single")
        ),
        *(
            ("loss", usual),
            ("optimizer", ("sgd",)),
            ("captured", (False,)),
            ("looks", ((),)),
            ("samples", (8,)),
        ),
    ):
        for value in values:
            if getattr(case, what) != value:
                yield replace(case, **{what: value})


def legal(case: Case) -> bool:
    """Whether a simpler case still makes sense."""
    features = set(case.features)
    owned = all(name in HABITS or name.partition(": ")[0] in features for _, name in case.habits)
    needs = all(HABITS[name].needs(case) for _, name in case.habits if name in HABITS)
    alone = case.captured or not (case.inline or case.skip or case.forces or case.collect or case.borrow)
    return owned and needs and alone


def smallest(finding: Finding) -> Finding:
    """The finding of a case as small as can be that ends in the same verdict."""
    tried: set[str] = set()
    while True:
        for case in simpler(finding.case):
            if repr(case) in tried or not legal(case):
                continue
            tried.add(repr(case))
            found = judged(case)
            if found.verdict == finding.verdict:
                finding = found
                break
        else:
            return finding


# -- many cases


def _serve(connection: Any) -> None:
    """Judge the cases whose seeds and numbers come."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - threads that fail print their tracebacks
    while True:
        case, shrinks = connection.recv()
        try:
            found = judged(case)
            if shrinks and found.verdict in ("WRONG", "internal"):
                found = replace(found, small=described(smallest(found).case))
        except Exception as error:
            found = Finding(case, "internal", f"this script: {type(error).__name__}: {error}")
        connection.send(found)


class Server:
    """A process that judges cases; it is ended where one takes too long."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.process: Any = None
        self.count = 0

    def judge(self, case: Case, *, shrinks: bool) -> Finding:
        if self.process is None or self.count >= CASES_OF_A_PROCESS:
            self.start()
        self.count += 1
        assert self.connection is not None
        try:
            self.connection.send((case, shrinks))
            if self.connection.poll(PATIENCE_SECONDS * (10 if shrinks else 1)):
                found: Finding = self.connection.recv()
                return found
            text = f"no end within {PATIENCE_SECONDS:g} s"
            verdict = "hang"
        except (EOFError, OSError):
            text, verdict = "the process died", "internal"
        self.stop()
        return Finding(case, verdict, text)

    def start(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.count = 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None


def findings(cases: Iterable[Case], *, shrinks: bool = False) -> Iterator[Finding]:
    """What became of cases; a hang is tried twice."""
    server = Server()
    try:
        for case in cases:
            found = server.judge(case, shrinks=shrinks)
            if found.verdict == "hang":
                server.stop()
                found = server.judge(case, shrinks=shrinks)
            yield found
    finally:
        server.stop()


def described(case: Case) -> str:
    """A case in a line."""
    parts = ["recorded" if case.captured else "listed", case.scheme]
    parts += [f"{name}={getattr(value, 'value', value)}" for name, value in case.options.items()]
    parts += [f"{case.replicas} replicas"] if case.replicas > 1 else []
    parts += ["a model outside"] if case.model_outside else []
    parts += [f"{name} inline" for _, name in case.inline] + [n for n in case.blocks if n in FEATURES]
    parts += [f"shared {case.shared[0]}"] if case.shared else []
    parts += [
        what
        for what in ("tied", "skip", "repeat", "forces", "collect", "borrow", "single")
        if getattr(case, what)
    ]
    for what in ("container", "form", "inputs"):
        value = getattr(case, what)
        parts += [f"{what} {value}"] if value != "tensor" else []
    parts.append(f"loss: {case.loss}")
    parts += [f"before step {step}: {name}" for step, name in case.habits]
    return "; ".join(parts)


def labels(case: Case) -> list[str]:
    """What a case is counted under."""
    loss = (
        []
        if case.loss in ("mean of squares", "cross entropy", "mean by hand", "focal")
        else [f"loss: {case.loss}"]
    )
    return [
        *(f"habit: {name}" for _, name in case.habits),
        *(f"feature: {name}" for name in case.features),
        *([f"shared: {case.shared[0]}"] if case.shared else []),
        *loss,
        f"scheme: {case.scheme.partition('(')[0]}",
    ]


def table(found: list[Finding]) -> list[str]:
    """Counts by habit, feature, loss and scheme."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        for label in labels(each.case):
            rows[label][each.verdict] += 1
    head = ["| what | cases | " + " | ".join(VERDICTS) + " |", "|---|" + "---|" * (len(VERDICTS) + 1)]
    return head + [
        f"| {label} | {sum(counts.values())} | {' | '.join(str(counts[v]) for v in VERDICTS)} |"
        for label, counts in sorted(rows.items())
    ]


def report(found: list[Finding], seed: int) -> list[str]:
    """The kept text."""
    counts = Counter(each.verdict for each in found)
    numbers = f"cases {found[0].case.number} to {found[-1].case.number}" if found else ""
    lines = [
        f"seed {seed}, {numbers}; {machine_line()}",
        "",
        ", ".join(f"{counts[v]} {v}" for v in VERDICTS),
        "",
    ]
    bad = [each for each in found if each.verdict in BAD]
    for each in bad:
        lines += [
            f"--seed {seed} --case {each.case.number}: {each.verdict}: {each.text}",
            f"    {described(each.case)}",
        ]
    return [*lines, *([""] if bad else []), *table(found)]


def one(seed: int, number: int) -> int:
    """Run one case and print all of it."""
    torch.set_num_threads(1)
    case = drawn(seed, number)
    print(case)
    print(described(case))
    found = judged(case)
    plain = None if found.verdict == "void" else run_plain(case)
    records, error = run_staged(case, TIMEOUT_SECONDS)
    if plain is not None:
        print("one process", plain.losses, {k: v for k, v in plain.looks.items() if isinstance(v, float)})
    print(
        "pipeline   ", records[0].losses, {k: v for k, v in records[0].looks.items() if isinstance(v, float)}
    )
    for note in records[0].notes:
        print("note", note)
    if error is not None:
        traceback.print_exception(error)
    print(f"{found.verdict}: {found.text} ({found.seconds:.1f} s)")
    return found.verdict in BAD


def main() -> None:
    parser = arguments(__doc__, "user_programs.*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument(
        "--habit", default="", help="only cases with a habit or feature of which this is a part"
    )
    parser.add_argument("--each", action="store_true", help="every feature, habit and loss once, alone")
    parser.add_argument("--shrink", action="store_true", help="say the smallest program with the same fault")
    parser.add_argument("--quiet", action="store_true", help="do not print refusals")
    options = parser.parse_args()
    if options.case is not None:
        sys.exit(one(options.seed, options.case))
    last = options.first + options.cases
    if options.each:
        cases = each_alone(options.seed)[options.first : last]
    else:
        cases = [drawn(options.seed, number) for number in range(options.first, last)]
    cases = [case for case in cases if any(options.habit in label for label in labels(case))]
    found: list[Finding] = []
    for each in findings(cases, shrinks=options.shrink):
        found.append(each)
        if each.verdict != "equal" and not (options.quiet and each.verdict not in BAD):
            print(
                f"{each.case.number} {each.verdict}: {each.text[:300]}\n    {described(each.case)}",
                flush=True,
            )
            if each.small:
                print(f"    smallest: {each.small}", flush=True)
    lines = report(found, options.seed)
    print(*lines, f"{sum(each.seconds for each in found):.0f} s of processor time", sep="\n")
    if options.keep:
        keep("user_programs", lines)
    sys.exit(any(each.verdict in BAD for each in found))


if __name__ == "__main__":
    main()
