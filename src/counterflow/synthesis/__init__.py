"""The best order for a workload and costs, with a bound.

A workload says what to compute, costs say how long it takes, limits say what a worker may hold. This room
looks for the order with the shortest step, and for a bound that no order can beat. ``synthesize`` runs the
methods below one after another (``compute.py``). Each begins with the best orders so far, and the first
method that reaches the bound is the last. The result is a ``Synthesis`` (``synthesis_result.py``).

**The problem** (``problem.py``). Micro-batches of one pipe are alike, so a worker's order need not name them.
It is a *word*: which *letter*, that is which kind of op of which stage, is next. Limits of activations and of
bytes are *stores*: each letter takes something when it starts, and returns something when it ends.

**Bounds** (``bounds/``): milliseconds, no solver. Rules that hold in every order (needs, micro-batches one
after another, limits) give each op a least time before it and after it. From these follow minimum steps: by
one micro-batch's path, by the work of a worker or a link, by what memory allows. They are often reached in
small pipelines, and too low if memory is very scarce.

**Named schemes** (``named.py``): every order that a scheme has for the same ops and that keeps the limits.
The result is never worse than the best of them. If F = I = W the bound often proves one of them at once. In
large problems building one takes seconds. Then each scheme is built once, and with further options only in
the first 40 % of the time.

**Repeating blocks** (``blocks/``). A block says when the ops of one micro-batch of every pipe start; the next
micro-batches follow period by period (``modulo.py``). Its size does not depend on N, so this is the method
for many workers and micro-batches; V-Half and its kin were found so. Blocks come from annealing
(``pattern_moves.py``) and, up to 120 letters, from a solver (``pattern_solver.py``). A block is unrolled to
all micro-batches. Then it is *squeezed* (``squeeze.py``): where a worker would wait, it runs a later op that
can run, alternately from the front and from the back. The best named orders are squeezed too. The maximum
delay that such an op may cause to the next one determines the quality, so it is drawn at random for each side
(``wander.py``), repeatedly, and the best results are squeezed again.

**Search** (``search/``): any size, no proof. The best of the orders known are annealed by moving ops within a
worker's word (``moves.py``), each new order played by a compiled loop (``kernel.py``). It may change any op,
so it improves the parts that blocks do not determine, above all warm-up and drain, which matter most if
micro-batches are few.

**Exact method** (``exact/``): proves an order, or finds a better one. OR-tools' CP-SAT is asked for orders at
or below a target (``exact/constraint_model.py``); a target that none meets raises the bound. It is for small
problems: at most 60,000 pairs of ops that share a worker, as 8 workers with a stage each and 40 micro-batches
have. It needs OR-tools, the extra ``counterflow[synthesize]``; the common part of both models is in
``solver.py``.

Time is divided as follows: of the time that the named schemes leave, blocks and squeezing have 40 %; of the
rest the search has 40 % if the exact method follows, otherwise all; the exact method has what remains. With
``moves`` there is no clock: all named schemes are built, the search makes this many moves, blocks have one
turn and squeezing 40, and as many again for each 10,000 moves, but no solver, and the exact method has one
thread and an effort in proportion. Then the same input gives the same order on any machine.

Invariant: the simulator decides. Whatever a method claims about an order, it is played by ``simulate`` and
kept only if it is better, within all limits.

Not here: other placements, cuts or numbers of micro-batches (``plan`` chooses these); asynchronous workloads,
doubled forwards and divided backwards are refused.
"""

from __future__ import annotations

from .bounds.lower import Bound, lower_bound
from .compute import synthesize
from .posing import problem_of
from .problem import Limit, Objective, Problem
from .synthesis_result import Synthesis

__all__ = ["Bound", "Limit", "Objective", "Problem", "Synthesis", "lower_bound", "problem_of", "synthesize"]
