"""Find the rules and nudges of mixpipe_plan.py again.

    python benchmarks/mixpipe_search.py rules
    python benchmarks/mixpipe_search.py nudges

``rules`` draws SAMPLES random rules (seeded), simulates each on every shape of `shapes`, and picks
RULE_COUNT of them greedily, so that the best of the picked loses as little as possible to the best
of all. ``nudges`` takes each shape with D <= 16 and K >= D/2, anneals the due times of single ops from
the best of `RULES`, drops what is not needed, and prints what came out shorter than the rules alone.
Both print Python to be pasted into mixpipe_plan.py. A few minutes each on one core.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from numba import njit

from counterflow.schedule.schemes import mixpipe_plan as orders

SAMPLES = 30_000
RULE_COUNT = 32
NUDGE_STARTS = 6
NUDGE_STEPS = 250_000
LOSS_CAP = 20
NOT_DONE = 1 << 20


@njit(cache=True)
def makespan(depth, pairs, warm_up, room, due_f, due_b, lookahead, limit):
    """What orders.Plan.run computes, or NOT_DONE if more than `limit`."""
    half = depth // 2
    ends_f = np.zeros((depth, pairs), np.int64)
    ends_b = np.zeros((depth, pairs), np.int64)
    count_f = np.zeros(depth, np.int64)
    count_b = np.zeros(depth, np.int64)
    free_at = np.zeros(half, np.int64)
    left = 2 * depth * pairs
    now = 0
    while left:
        if now >= limit:
            return NOT_DONE
        for worker in range(half):
            if free_at[worker] > now:
                continue
            late = depth - 1 - worker
            backwards = count_b[worker] + count_b[late]
            stash = count_f[worker] + count_f[late] - backwards
            warming = worker == 0 and backwards == 0
            best_kind = -1
            best_stage = best_due = best_input = 0
            for side in range(2):
                stage = late if side else worker
                pair = count_f[stage]
                if pair == pairs:
                    continue
                arrives = 0
                if stage > 0:
                    if count_f[stage - 1] <= pair:
                        continue
                    arrives = ends_f[stage - 1, pair]
                if arrives > now + lookahead:
                    continue
                kept = 0
                if side == 0:
                    if warming and pair == warm_up:
                        continue
                    if pair - count_f[late] == room - 1:
                        continue
                elif warming:
                    kept = warm_up - count_f[0]
                if room - stash - kept <= 0:
                    continue
                if best_kind < 0 or due_f[stage, pair] < best_due:
                    best_kind, best_stage = 0, stage
                    best_due, best_input = due_f[stage, pair], arrives
            for side in range(2):
                stage = late if side else worker
                pair = count_b[stage]
                if pair >= count_f[stage]:
                    continue
                arrives = now
                if stage < depth - 1:
                    if count_b[stage + 1] <= pair:
                        continue
                    arrives = ends_b[stage + 1, pair]
                if arrives > now + lookahead or (worker == 0 and count_f[0] < warm_up):
                    continue
                if best_kind < 0 or due_b[stage, pair] < best_due:
                    best_kind, best_stage = 1, stage
                    best_due, best_input = due_b[stage, pair], arrives
            if best_kind < 0 or best_input > now:
                continue
            left -= 1
            if best_kind == 0:
                ends_f[best_stage, count_f[best_stage]] = free_at[worker] = now + 1
                count_f[best_stage] += 1
            else:
                ends_b[best_stage, count_b[best_stage]] = free_at[worker] = now + 2
                count_b[best_stage] += 1
        now += 1
    last = free_at.max()
    return last if last <= limit else NOT_DONE


@njit(cache=True)
def anneal(depth, pairs, warm_up, room, due_f, due_b, lookahead, steps, heat, seed):
    """Move due times of single ops; the shortest makespan, and the due times that give it."""
    np.random.seed(seed)
    current = makespan(depth, pairs, warm_up, room, due_f, due_b, lookahead, NOT_DONE)
    best, best_f, best_b = current, due_f.copy(), due_b.copy()
    start_f, start_b = due_f.copy(), due_b.copy()
    for step in range(steps):
        kept_f, kept_b = due_f.copy(), due_b.copy()
        for _ in range(1 + np.random.randint(2)):
            stage, pair = np.random.randint(depth), np.random.randint(pairs)
            by = np.random.randint(1, 7) * (1 if np.random.randint(2) else -1)
            reset = np.random.randint(3) == 0
            if np.random.randint(2):
                due_f[stage, pair] = start_f[stage, pair] if reset else due_f[stage, pair] + by
            else:
                due_b[stage, pair] = start_b[stage, pair] if reset else due_b[stage, pair] + by
        warmth = heat * (1 - step / steps) + 0.02
        limit = current + int(-warmth * math.log(np.random.random() + 1e-12))
        found = makespan(depth, pairs, warm_up, room, due_f, due_b, lookahead, limit)
        if found > limit:
            due_f, due_b = kept_f, kept_b
            continue
        current = found
        if current < best:
            best, best_f, best_b = current, due_f.copy(), due_b.copy()
    return best, best_f, best_b


def shapes() -> list[tuple[int, int, int, int]]:
    """(depth, K, early forwards, N): all N = D up to 16, some deeper, some longer."""
    found = []
    for depth in range(6, 17, 2):
        for k in range(2, depth + 1, 2):
            found += [(depth, k, g, depth) for g in range((depth - k) // 2 + 1)]
    for depth in (20, 24, 32):
        for k in range(2, depth + 1, 4):
            found += [(depth, k, g, depth) for g in range(0, (depth - k) // 2 + 1, 4)]
    for depth in (4, 8, 12):
        for k in range(2, depth + 1, 2):
            found += [(depth, k, g, 4 * depth) for g in range((depth - k) // 2 + 1)]
    return found


def find_rules() -> None:
    rng = np.random.default_rng(1)
    low, high = np.array([0, 0, -16, -6, 0]), np.array([8, 8, 17, 7, 3])
    rules = [orders.Rule(*map(int, row)) for row in rng.integers(low, high, (SAMPLES, 5))]
    todo = shapes()
    spans = np.empty((SAMPLES, len(todo)), np.int64)
    for column, (depth, k, g, n) in enumerate(todo):
        pairs = n // 2
        for row, rule in enumerate(rules):
            due_f, due_b = due_times(depth, pairs, rule)
            spans[row, column] = makespan(
                depth, pairs, min(k // 2, pairs), k + g, due_f, due_b, rule.lookahead, NOT_DONE
            )
    # The shapes with a required time count most.
    weight = np.array([5.0 if n == d <= 16 and 2 * k >= d else 1.0 for d, k, _, n in todo])
    loss = np.minimum(spans - spans.min(0), LOSS_CAP)
    current = np.full(len(todo), LOSS_CAP)
    for _ in range(RULE_COUNT):
        pick = int((np.minimum(loss, current) @ weight).argmin())
        current = np.minimum(current, loss[pick])
        print(f"    Rule{tuple(rules[pick])},  # loss {current @ weight:.0f}")


@njit(cache=True)
def _fill(depth, pairs, pace_f, pace_b, back, late):
    due_f = np.empty((depth, pairs), np.int64)
    due_b = np.empty((depth, pairs), np.int64)
    for s in range(depth):
        for j in range(pairs):
            due_f[s, j] = s + (late if s >= depth // 2 else 0) + pace_f * j
            due_b[s, j] = back + 2 * (depth - 1 - s) + pace_b * j
    return due_f, due_b


def due_times(depth: int, pairs: int, rule: orders.Rule) -> tuple[np.ndarray, np.ndarray]:
    back = depth + int(rule.backward_start * depth / 8)
    late = int(rule.late_start * depth / 16)
    return _fill(depth, pairs, rule.forward_pace, rule.backward_pace, back, late)


def find_nudges() -> None:
    for depth, k, g, n in shapes():
        if n != depth or depth > 16 or 2 * k < depth or k == depth:
            continue
        pairs, warm_up, room = depth // 2, k // 2, k + g

        def span(due: tuple[np.ndarray, np.ndarray], rule: orders.Rule) -> int:
            return makespan(depth, pairs, warm_up, room, *due, rule.lookahead, NOT_DONE)

        ranked = sorted(orders.RULES, key=lambda rule: span(due_times(depth, pairs, rule), rule))
        best = alone = span(due_times(depth, pairs, ranked[0]), ranked[0])
        text = ""
        fewest = 0
        for seed, rule in enumerate(ranked[:NUDGE_STARTS]):
            due = due_times(depth, pairs, rule)
            found, *moved = anneal(depth, pairs, warm_up, room, *due, rule.lookahead, NUDGE_STEPS, 0.5, seed)
            due = due_times(depth, pairs, rule)
            if found > best or found == alone:
                continue
            prune(moved, due, lambda: span((moved[0], moved[1]), rule) <= found)
            nudges = [
                orders.Nudge("FB"[kind], int(pair), int(stage), int((moved[kind] - due[kind])[stage, pair]))
                for kind in (0, 1)
                for stage, pair in np.argwhere(moved[kind] != due[kind])
            ]
            if found < best or len(nudges) < fewest:
                best, fewest = found, len(nudges)
                moves = "".join(f"Nudge{tuple(nudge)}, " for nudge in nudges)
                text = f"    ({depth}, {k}, {g}): (Rule{tuple(rule)}, ({moves})),"
        if text:
            print(text, f" # {alone - 3 * depth} -> {best - 3 * depth}", flush=True)


def prune(moved, due, still_good) -> None:
    """Undo every move that the makespan does not need."""
    for _ in range(3):
        for kind in (0, 1):
            for stage, pair in np.argwhere(moved[kind] != due[kind]):
                kept = moved[kind][stage, pair]
                moved[kind][stage, pair] = due[kind][stage, pair]
                if not still_good():
                    moved[kind][stage, pair] = kept


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "rules"
    {"rules": find_rules, "nudges": find_nudges}[what]()
