"""Check mixpipe_orders with a simulation of its own, and print tables (a few minutes).

    python benchmarks/mixpipe_sweep.py [--against REVISION]

With a revision, the orders of that revision's mixpipe_plan.py are timed beside today's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import product
from types import ModuleType

from counterflow.schedule.orders import mixpipe_plan
from counterflow.schedule.orders.mixpipe_plan import mixpipe_orders

Op = tuple[str, int]

LITERAL = {
    (4, 0): ("F0 F2 F1 B1 F3 B3 B0 B2", "F0 F1 F2 F3 B1 B0 B3 B2"),
    (2, 0): ("F0 F1 B1 F2 B0 F3 B3 B2", "F0 F1 B1 F2 B0 F3 B3 B2"),
    (2, 1): ("F0 F1 B1 F2 F3 B3 B0 B2", "F0 F1 B1 F2 F3 B0 B3 B2"),
}
OPTIMUM = {
    (4, 2, 0): 9, (4, 2, 1): 6, (4, 4, 0): 4, (6, 4, 0): 12, (6, 4, 1): 10, (6, 6, 0): 8,
    (8, 4, 0): 23, (8, 4, 1): 19, (8, 4, 2): 17, (8, 6, 0): 15, (8, 6, 1): 14,
}  # fmt: skip
AIM = {(14, 8, 0): 36, (16, 8, 0): 48, (16, 8, 1): 43}


def simulate(orders: list[list[Op]], depth: int, micro_batches: int) -> tuple[int, list[int]]:
    """Makespan, and the peak of each worker, from starts found by the longest path."""
    ends: dict[tuple[str, int, int], int] = {}
    at = [0] * depth
    clock = [0] * depth
    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(orders):
            while at[worker] < len(order):
                kind, m = order[at[worker]]
                stage = worker if m % 2 == 0 else depth - 1 - worker
                needs = []
                if kind == "F":
                    if stage > 0:
                        needs.append(("F", stage - 1, m))
                else:
                    needs.append(("F", stage, m))
                    if stage < depth - 1:
                        needs.append(("B", stage + 1, m))
                if any(need not in ends for need in needs):
                    break
                start = max([clock[worker], *(ends[need] for need in needs)])
                assert (kind, stage, m) not in ends, "run twice"
                clock[worker] = start + (1 if kind == "F" else 2)
                ends[kind, stage, m] = clock[worker]
                at[worker] += 1
                moved = True
    assert len(ends) == 2 * depth * micro_batches, "deadlock, or ops missing"
    peaks = []
    for order in orders:
        held = peak = 0
        for kind, _ in order:
            held += 1 if kind == "F" else -1
            peak = max(peak, held)
        peaks.append(peak)
    return max(clock), peaks


def mirrored(orders: list[list[Op]]) -> bool:
    return all(
        [(kind, m ^ 1) for kind, m in order] == orders[len(orders) - 1 - worker]
        for worker, order in enumerate(orders)
    )


def injected_first(order: list[Op], parity: int) -> int:
    """Forwards of the pipe that starts here, before the first backward."""
    count = 0
    for kind, m in order:
        if kind == "B":
            break
        count += m % 2 == parity
    return count


def check(depth: int, n: int, k: int, g: int, problems: list[str]) -> tuple[int, int, list[int], float]:
    """Idle units of the busiest worker (makespan - its busy time), makespan, peaks, seconds."""
    began = time.perf_counter()
    orders = mixpipe_orders(depth, n, k, g)
    took = time.perf_counter() - began
    name = f"D={depth} N={n} K={k} G={g}"
    makespan, peaks = simulate(orders, depth, n)
    if max(peaks) > k + g:
        problems.append(f"{name}: peak {max(peaks)}")
    if n % 2 == 0 and not mirrored(orders):
        problems.append(f"{name}: not symmetric")
    firsts = [(orders[0], 0, (n + 1) // 2), (orders[-1], 1, n // 2)]
    for order, parity, most in firsts:
        got = injected_first(order, parity)
        want = min(k // 2, most)
        if most and got != want:
            problems.append(f"{name}: {got} forwards injected, not {want}")
    return makespan - 3 * n, makespan, peaks, took


def legal(depth: int) -> list[tuple[int, int]]:
    return [(k, g) for k in range(2, depth + 1, 2) for g in range((depth - k) // 2 + 1)]


def concatenated(depth: int, n: int, k: int, g: int) -> int:
    """Makespan of direct concatenation of units of D (Section III-C)."""
    unit = mixpipe_orders(depth, depth, k, g)
    orders = [[(kind, m + depth * u) for u in range(n // depth) for kind, m in order] for order in unit]
    return simulate(orders, depth, n)[0]


def sweep_literal(problems: list[str]) -> None:
    for (k, g), near in LITERAL.items():
        got = [" ".join(f"{kind}{m}" for kind, m in o) for o in mixpipe_orders(4, 4, k, g)]
        same = tuple(got[:2]) == near and mirrored(mixpipe_orders(4, 4, k, g))
        print(f"D=4 K={k} G={g} literal order: {'same' if same else 'DIFFERENT'}")
        if not same:
            problems.append(f"literal D=4 K={k} G={g}")


def sweep_small(problems: list[str]) -> None:
    print("\nN = D <= 16. 'best' is the optimum with K/2 forwards first, for D = 14 and 16 the best known")
    print("order. '>' marks idle above the formula where it is required (K >= D/2; for D = 14, 16: K > D/2),")
    print("'~' above it for K < D/2, where it is not.")
    print("  D  K  G  idle  formula  best  middle/largest/allowed peak   ms")
    slowest = 0.0
    for depth in range(2, 17, 2):
        for k, g in legal(depth):
            idle, _, peaks, took = check(depth, depth, k, g, problems)
            slowest = max(slowest, took)
            formula = 5 * depth - 3 * k - 4 - 3 * g
            mark = " "
            if idle > formula:
                mark = "~" if 2 * k < depth else ">"
                if 2 * k > depth or (2 * k == depth and depth <= 12):
                    problems.append(f"D={depth} K={k} G={g}: idle {idle} > {formula}")
            best = OPTIMUM.get((depth, k, g), AIM.get((depth, k, g), ""))
            print(
                f" {depth:2} {k:2} {g:2}  {idle:4}{mark}  {formula:6}  {best!s:>4}"
                f"  {peaks[depth // 2 - 1]:6}/{max(peaks)}/{k + g:<20} {1000 * took:5.1f}"
            )
    print(f"slowest: {slowest:.3f} s")


def sweep_deep(problems: list[str]) -> None:
    print("\nN = D, deeper: every fourth K and G to D = 32, some to 64")
    count = above = 0
    slowest = (0.0, "")
    shapes = [(depth, k, g) for depth in range(18, 33, 2) for k, g in legal(depth)[::4]]
    shapes += [(depth, k, g) for depth in (40, 48, 56, 64) for k, g in legal(depth)[::61]]
    for depth, k, g in shapes:
        idle, _, _, took = check(depth, depth, k, g, problems)
        slowest = max(slowest, (took, f"D={depth} K={k} G={g}"))
        count += 1
        if 2 * k >= depth and idle > 5 * depth - 3 * k - 4 - 3 * g:
            above += 1
            print(f"  K >= D/2, idle above the formula: D={depth} K={k} G={g} {idle}")
    print(f"{count} shapes, {above} with K >= D/2 above the formula;", end=" ")
    print(f"slowest {slowest[0]:.2f} s at {slowest[1]}")


def sweep_max(problems: list[str]) -> None:
    print("\nK=max:  D   N  idle  want  peak  want")
    for depth in (4, 6, 8, 12, 16):
        for n in (2 * depth, 4 * depth, 8 * depth):
            orders = mixpipe_orders(depth, n, None, 0)
            makespan, peaks = simulate(orders, depth, n)
            got = (makespan - 3 * n, max(peaks))
            want = (3 * (depth // 2 - 1), 3 * depth // 2 - 1)
            print(f"       {depth:2} {n:3}  {got[0]:4}  {want[0]:4}  {got[1]:4}  {want[1]:4}")
            if got != want or not mirrored(orders):
                problems.append(f"K=max D={depth} N={n}: {got}")
    shapes = off = 0
    for depth in (*range(2, 17, 2), 32, 64):
        for n in range(1, 4 * depth + 1) if depth <= 16 else (1, 7, depth, 2 * depth, 4 * depth):
            orders = mixpipe_orders(depth, n, None, 0)
            makespan, peaks = simulate(orders, depth, n)
            shapes += 1
            if max(peaks) > 3 * depth // 2 - 1 or (n % 2 == 0 and not mirrored(orders)):
                problems.append(f"K=max D={depth} N={n}")
            off += n % 2 == 0 and n >= 2 * depth and makespan - 3 * n != 3 * (depth // 2 - 1)
    print(f"K=max, N in 1..4D, D <= 16 and some deeper: {shapes} shapes; {off} even N >= 2D off 3(D/2-1)")


def sweep_other_n(problems: list[str]) -> None:
    print("\nN != D, D in 2..12, all K and G; and against direct concatenation at 2D, 4D")
    count = longer = 0
    gained = []
    slowest = 0.0
    for depth in range(2, 13, 2):
        for n in sorted({1, 2, 3, depth // 2, depth - 1, depth + 1, 2 * depth, 3 * depth + 1, 4 * depth}):
            for k, g in legal(depth):
                _, makespan, _, took = check(depth, n, k, g, problems)
                slowest = max(slowest, took)
                count += 1
                if n in (2 * depth, 4 * depth):
                    other = concatenated(depth, n, k, g)
                    gained.append(1 - makespan / other)
                    if makespan > other:
                        longer += 1
                        print(f"  longer than concatenation: D={depth} N={n} K={k} G={g}", makespan, other)
    print(f"{count} shapes, slowest {slowest:.2f} s; of {len(gained)} at 2D and 4D {longer} are longer than")
    print(f"direct concatenation, on average {100 * sum(gained) / len(gained):.1f}% shorter")
    for depth, n, k, g in ((16, 128, 8, 0), (64, 256, 32, 0), (64, 512, 2, 31), (64, 63, 20, 5)):
        _, makespan, peaks, took = check(depth, n, k, g, problems)
        print(f"D={depth} N={n} K={k} G={g}: makespan {makespan}, peak {max(peaks)}, {took:.2f} s")


def medium() -> list[tuple[int, int, int, int]]:
    """(D, N, K, G): every K and G for N = D = 6..16, and for N = 2D, 4D and 8D at some depths."""
    shapes = [(depth, depth, k, g) for depth in range(6, 17, 2) for k, g in legal(depth)]
    return shapes + [(d, times * d, k, g) for d in (4, 8, 12) for times in (2, 4, 8) for k, g in legal(d)]


def told(spans: list[int], base: list[int]) -> str:
    """How much longer, on average and at most, for N = D and for the other shapes."""
    text = []
    for same in (True, False):
        longer = [
            100 * (span / least - 1)
            for (depth, n, *_), span, least in zip(medium(), spans, base, strict=True)
            if (n == depth) == same
        ]
        text.append(f"{sum(longer) / len(longer):+6.2f} % ({min(longer):+5.1f} .. {max(longer):+5.1f})")
    return "   ".join(text)


def sweep_parts() -> None:
    """What each part of the method gains."""
    rules = list(product(mixpipe_plan.WAITS, mixpipe_plan.STARTS))
    once: list[list[int]] = []  # by shape, by rule: the makespan of the first plan
    both: list[list[int]] = []  # of the better one
    for depth, n, k, g in medium():
        shape = mixpipe_plan.Shape(depth, n // 2, k + g, min(k // 2, n // 2))
        last = (depth + 1) * (n // 2) - 1  # of stage 0 the last backward
        plans = []
        for wait, start in rules:
            due = mixpipe_plan._linear(shape, pace=4, start=start * depth // 2)
            there, back = mixpipe_plan._there_and_back(shape, due, wait, known=[])
            plans.append((there[last], back[last]))
        once.append([there for there, _ in plans])
        both.append([min(pair) for pair in plans])
    base = [min(spans) for spans in both]
    print("\nWhat the parts gain: how much longer the orders are without one")
    print("                              N = D = 6..16              N = 2D, 4D, 8D; D = 4, 8, 12")
    print("without there and back     ", told([min(spans) for spans in once], base))
    for at, name in enumerate(("wait", "start")):
        for value in (mixpipe_plan.WAITS, mixpipe_plan.STARTS)[at]:
            kept = [number for number, rule in enumerate(rules) if rule[at] != value]
            spans = [min(row[number] for number in kept) for row in both]
            print(f"without {name} {value:2}{'':{15 - len(name)}} ", told(spans, base))
    best = min(range(len(rules)), key=lambda number: sum(row[number] for row in both))
    name = "wait {}, start {} alone".format(*rules[best])
    print(f"{name:27}", told([row[best] for row in both], base))


def sweep_against(revision: str) -> None:
    old = ModuleType("old_plan")
    old.__package__ = mixpipe_plan.__package__  # tables of orders are today's
    sys.modules["old_plan"] = old
    for room in ("orders", "schemes"):  # where the file is, or was
        path = f"src/counterflow/schedule/{room}/mixpipe_plan.py"
        text = subprocess.run(
            ["git", "show", f"{revision}:{path}"], capture_output=True, text=True, check=False
        )
        if text.returncode == 0:
            break
    text.check_returncode()
    exec(compile(text.stdout, path, "exec"), old.__dict__)
    spans, base, seconds = [], [], [0.0, 0.0]
    for depth, n, k, g in medium():
        for kept, made in ((spans, mixpipe_orders), (base, old.mixpipe_orders)):
            began = time.process_time()
            orders = made(depth, n, k, g)
            seconds[kept is base] += time.process_time() - began
            kept.append(simulate(orders, depth, n)[0])
    print(f"\nAgainst the orders of {revision}")
    print("today's orders are longer by", told(spans, base))
    longer = sum(span > least for span, least in zip(spans, base, strict=True))
    shorter = sum(span < least for span, least in zip(spans, base, strict=True))
    print(f"{longer} longer, {shorter} shorter, of {len(base)};", end=" ")
    print(f"built in {seconds[0]:.1f} s, then {seconds[1]:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", metavar="REVISION")
    arguments = parser.parse_args()
    problems: list[str] = []
    sweep_literal(problems)
    sweep_small(problems)
    sweep_parts()
    if arguments.against:
        sweep_against(arguments.against)
    sweep_max(problems)
    sweep_other_n(problems)
    sweep_deep(problems)
    print(f"\n{len(problems)} violations")
    for problem in problems[:50]:
        print("  ", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
