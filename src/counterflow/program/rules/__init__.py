"""The checker's rules: a table of named properties of a schedule and of the actions it is lowered to.

Each rule yields a line for each violation: the place, what was expected, what was found. Rules that read only
the schedule come first. Those that read the lowered program hold for every list that ``lowering.py`` makes;
they catch a faulty pass, or a hand-made program.
"""

from __future__ import annotations

from functools import partial

from counterflow.errors import DeadlockError
from counterflow.schedule.ir import Product

from .order_rules import (
    complete,
    own_first,
    pairs_fit,
    peak,
    placed,
    promised_versions,
    recomputed_first,
    slices_in_order,
)
from .plan_rules import buffers, communicators
from .subject import CheckSubject, Rule, details, require
from .traffic import (
    computes,
    computes_pairs,
    messages,
    no_deadlock,
    no_deadlock_holding,
    no_deadlock_rendezvous,
    posted,
)
from .updates import agreed, held_versions, sums_in_one_order, syncs

COMPLETE = Rule("every op exactly once", complete)
PLACED = Rule("every op on the worker that holds its stage", placed, (COMPLETE.name,))
FORWARD_FIRST = Rule(
    "forward before its backward", partial(own_first, Product.OUTPUT), (COMPLETE.name, PLACED.name)
)
INPUT_GRADIENT_FIRST = Rule(
    "input gradient before its weight gradients",
    partial(own_first, Product.INPUT_GRADIENT),
    (COMPLETE.name, PLACED.name),
)
RECOMPUTED_FIRST = Rule("recomputation before its backward", recomputed_first, (COMPLETE.name, PLACED.name))
SLICES = Rule("slices in the order of their states", slices_in_order, (COMPLETE.name, PLACED.name))
PAIRS = Rule("pairs are ops that can run at once", pairs_fit, (COMPLETE.name, PLACED.name))
DEADLOCK = Rule(
    "no deadlock with buffered sends",
    no_deadlock,
    (COMPLETE.name, PLACED.name, PAIRS.name),
    error=DeadlockError,
)
PROMISED = Rule("weight versions as promised", promised_versions, (COMPLETE.name, PLACED.name))
_LOWERABLE = (
    COMPLETE.name,
    PLACED.name,
    FORWARD_FIRST.name,
    INPUT_GRADIENT_FIRST.name,
    RECOMPUTED_FIRST.name,
    SLICES.name,
    PROMISED.name,
    PAIRS.name,
    DEADLOCK.name,
)
DEADLOCK_RENDEZVOUS = Rule(
    "no deadlock with rendezvous sends",
    no_deadlock_rendezvous,
    _LOWERABLE,
    lowered=True,
    error=DeadlockError,
)
MESSAGES = Rule("every send has its receive, in one order", messages, _LOWERABLE, lowered=True)
COMPUTES = Rule("each worker computes its order", computes, _LOWERABLE, lowered=True)
COMPUTES_PAIRS = Rule(
    "ops that run at once are pairs of the schedule",
    computes_pairs,
    (*_LOWERABLE, COMPUTES.name),
    lowered=True,
)
POSTED = Rule(
    "no receive is posted before an op of its own worker that the message needs",
    posted,
    (*_LOWERABLE, COMPUTES.name, MESSAGES.name),
    lowered=True,
)
DEADLOCK_HOLDING = Rule(
    "no deadlock with sends and receives that hold their worker",
    no_deadlock_holding,
    (*_LOWERABLE, COMPUTES.name, DEADLOCK_RENDEZVOUS.name, MESSAGES.name, POSTED.name),
    lowered=True,
    error=DeadlockError,
)
BUFFERS = Rule(
    "fewest receive buffers, each with one message at a time",
    buffers,
    (*_LOWERABLE, COMPUTES.name, MESSAGES.name),
    lowered=True,
)
COMMUNICATORS = Rule(
    "a communicator for each direction, made in the fewest rounds",
    communicators,
    (*_LOWERABLE, COMPUTES.name, MESSAGES.name),
    lowered=True,
)
VERSIONS = Rule(
    "weight versions made once, and held while needed",
    held_versions,
    (*_LOWERABLE, COMPUTES.name),
    lowered=True,
)
SYNCS = Rule("gradient sync covers every copy", syncs, _LOWERABLE, lowered=True)
SUMS = Rule(
    "sums of the same workers start in one order",
    sums_in_one_order,
    (*_LOWERABLE, SYNCS.name),
    lowered=True,
)
AGREED = Rule("loss and norm agreed on before any update", agreed, _LOWERABLE, lowered=True)
PEAK = Rule("peak within the limit", peak)

RULES = (
    COMPLETE,
    PLACED,
    FORWARD_FIRST,
    INPUT_GRADIENT_FIRST,
    RECOMPUTED_FIRST,
    SLICES,
    PROMISED,
    PAIRS,
    DEADLOCK,
    COMPUTES,
    COMPUTES_PAIRS,
    DEADLOCK_RENDEZVOUS,
    MESSAGES,
    POSTED,
    DEADLOCK_HOLDING,
    BUFFERS,
    COMMUNICATORS,
    VERSIONS,
    SYNCS,
    SUMS,
    AGREED,
    PEAK,
)

__all__ = [
    "AGREED",
    "BUFFERS",
    "COMMUNICATORS",
    "COMPLETE",
    "COMPUTES",
    "COMPUTES_PAIRS",
    "DEADLOCK",
    "DEADLOCK_HOLDING",
    "DEADLOCK_RENDEZVOUS",
    "FORWARD_FIRST",
    "INPUT_GRADIENT_FIRST",
    "MESSAGES",
    "PAIRS",
    "PEAK",
    "PLACED",
    "POSTED",
    "PROMISED",
    "RECOMPUTED_FIRST",
    "RULES",
    "SLICES",
    "SUMS",
    "SYNCS",
    "VERSIONS",
    "CheckSubject",
    "Rule",
    "details",
    "require",
]
