"""The best order for a workload and costs, with a bound.

A workload says what there is to compute, costs say how long it takes, limits say what a worker may hold.
This room looks for the order with the shortest step, and for what no order can beat. ``synthesize`` runs
the methods below one after another (``compute.py``). Each begins with the best orders so far, and the
first one that reaches the bound is the last. What comes out is a ``Synthesis`` (``result.py``).

**The problem** (``problem.py``). Micro-batches of one pipe are alike, so a worker's order need not name
them. It is a *word*: which *letter*, that is which kind of op of which stage, comes next. Limits of
activations and of bytes are *stores*: each letter takes something when it starts, and gives something
back when it ends.

**Bounds** (``bounds/``): milliseconds, no solver. Rules that hold in every order
(needs, micro-batches one after another, limits) give each op a least time before it and after it. From
these follow least steps: by one micro-batch's path, by the work of a worker or a link, by what memory
allows. They are often reached in small pipelines, and too low where memory is very scarce.

**Named schemes** (``named.py``): every order that a scheme has for the same ops and that keeps the
limits. The result is never worse than the best of them. Where F = I = W the bound often proves one of
them at once. In large problems one takes seconds to build. Then each scheme is built once, and with further
options only in the first 40 % of the time.

**Repeating blocks** (``blocks/``). A block is when the ops of one micro-batch of every pipe start; the
next ones follow period by period (``modulo.py``). Its size does not depend on N, so this is the method
for many workers and micro-batches; V-Half and its kin were found so. Blocks come from annealing
(``pattern_moves.py``) and, up to 120 letters, from a solver (``pattern_solver.py``). A block is unrolled to
all micro-batches. Then it is *squeezed* (``squeeze.py``): where a worker would wait, it runs a later op
that can run; from the front and from the back in turns. The best named orders are squeezed too. How late such
an op may make the next one decides how good the result is, so it is drawn by chance for each side
(``wander.py``), again and again, and the best results are squeezed on.

**Search** (``search/``): any size, no proof. The best of the orders known are annealed by moving ops within
a worker's word (``moves.py``), each new order played by a compiled loop (``kernel.py``). It
may change any op, so it mends what blocks have no say in, warm-up and drain above all, which weigh most
where micro-batches are few.

**Exact method** (``exact/``): proves, or finds what is better. OR-tools' CP-SAT is asked for orders at
or below a target (``exact/model.py``); a target that none meets raises the bound. It is for small
problems: at most 60,000 pairs of ops that share a worker, as 8 workers with a stage each and 40
micro-batches have. It needs OR-tools, the extra ``counterflow[synthesize]``; what both models put to it
share is in ``solver.py``.

Time is divided so: of what the named schemes leave, blocks and squeezing have 40 %; of what is left then the
search has 40 % where the exact method follows, else all; the exact method has the rest. With ``moves`` there
is no clock: all named schemes are built, the search makes so many moves, blocks have one turn and squeezing
40, and as many again for each 10,000 moves, but no solver, and
the exact method has one thread and an effort in proportion. Then the same input gives the same order on
any machine.

Invariant: the simulator has the last word. Whatever a method says of an order, it is played by
``simulate`` and kept only if it is better, within all limits.

Not here: other placements, cuts or numbers of micro-batches (``plan`` chooses these); orders without a
flush, doubled forwards and divided backwards are refused.
"""

from __future__ import annotations

from .bounds.lower import Bound, lower_bound
from .compute import synthesize
from .posing import problem_of
from .problem import Limit, Objective, Problem
from .result import Synthesis

__all__ = ["Bound", "Limit", "Objective", "Problem", "Synthesis", "lower_bound", "problem_of", "synthesize"]
