"""Counterflow: pipeline-parallel training for PyTorch.

One schedule object, made by a pure function, is what the checker proves, the simulator times, the
pictures draw and the runtime executes. Importing this package does not import torch.
"""

from .draw import draw
from .errors import ConfigError, CounterflowError, DeadlockError, ScheduleError
from .schedule import schemes
from .schedule.check import check
from .schedule.ir import Op, OpKind, Schedule
from .simulate import ByteCosts, Costs, Simulation, simulate

__version__ = "0.1.0"

__all__ = [
    "ByteCosts",
    "ConfigError",
    "Costs",
    "CounterflowError",
    "DeadlockError",
    "Op",
    "OpKind",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "check",
    "draw",
    "schemes",
    "simulate",
]
