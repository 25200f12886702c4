"""Other values of options that change only the order, in the same memory: MixPipe's K, Γ and symmetry."""

from __future__ import annotations

from operator import attrgetter

from counterflow.program.player import accelerated
from counterflow.schedule import registry

from . import Simulation, simulate

MOST_OPS = 20_000
"""Maximum ops of all schedules that are built for one comparison."""


def shorter(result: Simulation) -> Simulation | None:
    """The shortest simulation of the same scheme with other values of these options in the same memory.

    Args:
        result: a simulated schedule of a scheme.

    Returns:
        None if no other values are shorter, if the scheme has no such options or promises no memory for
        them, or if there are more than ``MOST_OPS`` ops to build.

    >>> from counterflow.schedule.schemes import mixpipe
    >>> found = shorter(simulate(mixpipe(8, 8, injected=2, early_forwards=2)))
    >>> str(found.schedule), found.makespan
    ('mixpipe(stages=8, micro_batches=8, injected=4, early_forwards=0)', 47.0)
    """
    schedule = result.schedule
    scheme, options = registry.find(schedule.scheme), dict(schedule.options)
    if (
        scheme is None
        or scheme.most_stashed is None
        or not any(option.order_only for option in scheme.options)
    ):
        return None
    most, most_stashed = scheme.most_stashed(**options), scheme.most_stashed
    sizes = schedule.workers, schedule.micro_batches, schedule.stages
    fixed = {
        name: v for name, v in options.items() if not (option := scheme.option(name)) or not option.order_only
    }
    variants = [fixed | dict(more) for more in scheme.planner(*sizes)]
    promised = [(variant, most_stashed(**variant)) for variant in variants if variant != options]
    fitting = [
        variant for variant, peak in promised if most is not None and peak is not None and peak <= most
    ]
    if len(fitting) * sum(map(len, schedule.orders)) > MOST_OPS:
        return None
    plays = [simulate(registry.build(scheme.name, variant, accelerated), result.costs) for variant in fitting]
    peak = max(result.peak_activations)
    plays = [play for play in plays if max(play.peak_activations) <= peak]
    best = min(plays, key=attrgetter("makespan"), default=result)
    return best if best.makespan < result.makespan * (1 - 1e-9) else None
