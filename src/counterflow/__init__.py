"""Counterflow: pipeline-parallel training for PyTorch.

Train          Pipeline, Step, Evaluation, PendingEvaluation, Execution, Batching, launch, train
Choose         profile, plan, predict, compare, Comparison, memory
Prove          check, verify, same_model, SameModel
Schedules      schemes, Schedule, Op, OpKind, with_pairs, synthesize, Synthesis, draw
Simulation     simulate, Simulation, Costs, ByteCosts, lower, balanced_slices
Models         layers, models, Skip, Carry, attend, add_loss, added_losses, LossSum, next_target,
               whole_target, sum_over_copies, ENTRIES
Mesh           MeshDegrees, TensorParallel, ContextParallel, ExpertParallel, Share, share_sequence,
               join_sequence
Experts        dispatch, combine, grouped_linear, limit_capacity, TokenBalance
Checkpoints    save_checkpoint, load_checkpoint, load_weights
Errors         CounterflowError, ConfigError, ScheduleError, DeadlockError, WorkerError

``help(counterflow.Pipeline)`` describes one of them. One schedule object, made by a pure function, is what
the checker proves, the simulator times, the pictures draw and the runtime executes. Importing this package
does not import torch.
"""

from typing import TYPE_CHECKING

from . import testing as _testing  # noqa: F401 - it registers its transports
from .common.lazy import attributes
from .drawing import draw
from .errors import ConfigError, CounterflowError, DeadlockError, ScheduleError, WorkerError
from .program.checker import check
from .program.pairs import with_pairs
from .schedule import schemes
from .schedule.ir import Op, OpKind, Schedule
from .simulation import ByteCosts, Costs, Simulation, balanced_slices, lower, simulate
from .synthesis import Synthesis, synthesize

if TYPE_CHECKING:
    from . import models
    from .api.attention import attend
    from .api.aux_loss import add_loss, added_losses
    from .api.carry import Carry
    from .api.contexts import Share, join_sequence, share_sequence
    from .api.counters import sum_over_copies
    from .api.experts import TokenBalance, combine, dispatch, grouped_linear, limit_capacity
    from .api.loss_sum import LossSum, next_target, whole_target
    from .api.skip import Skip
    from .capture import layers
    from .checkpoints import load_checkpoint, load_weights, save_checkpoint
    from .execution import Batching, Execution
    from .planning.scheme_comparison import Comparison, compare
    from .runtime.counted_memory import memory
    from .runtime.execution.evaluation import PendingEvaluation
    from .runtime.execution.step import Evaluation, Step
    from .runtime.mesh.context_parallel import ContextParallel
    from .runtime.mesh.expert_parallel import ExpertParallel
    from .runtime.mesh.mesh_degrees import MeshDegrees
    from .runtime.mesh.tensor_parallel import TensorParallel
    from .runtime.mini_batch.entries import ENTRIES
    from .runtime.pipeline import Pipeline
    from .runtime.workers.launch import launch
    from .verbs import plan, predict, profile, train, verify
    from .verification.same_model import SameModel, same_model

__version__ = "0.1.0"

__all__ = [
    "ENTRIES",
    "Batching",
    "ByteCosts",
    "Carry",
    "Comparison",
    "ConfigError",
    "ContextParallel",
    "Costs",
    "CounterflowError",
    "DeadlockError",
    "Evaluation",
    "Execution",
    "ExpertParallel",
    "LossSum",
    "MeshDegrees",
    "Op",
    "OpKind",
    "PendingEvaluation",
    "Pipeline",
    "SameModel",
    "Schedule",
    "ScheduleError",
    "Share",
    "Simulation",
    "Skip",
    "Step",
    "Synthesis",
    "TensorParallel",
    "TokenBalance",
    "WorkerError",
    "add_loss",
    "added_losses",
    "attend",
    "balanced_slices",
    "check",
    "combine",
    "compare",
    "dispatch",
    "draw",
    "grouped_linear",
    "join_sequence",
    "launch",
    "layers",
    "limit_capacity",
    "load_checkpoint",
    "load_weights",
    "lower",
    "memory",
    "models",
    "next_target",
    "plan",
    "predict",
    "profile",
    "same_model",
    "save_checkpoint",
    "schemes",
    "share_sequence",
    "simulate",
    "sum_over_copies",
    "synthesize",
    "train",
    "verify",
    "whole_target",
    "with_pairs",
]


_LATE = {
    "share_sequence": "api.contexts",
    "join_sequence": "api.contexts",
    "Share": "api.contexts",
    "ContextParallel": "runtime.mesh.context_parallel",
    "Batching": "execution",
    "Carry": "api.carry",
    "Comparison": "planning.scheme_comparison",
    "ENTRIES": "runtime.mini_batch.entries",
    "Evaluation": "runtime.execution.step",
    "Execution": "execution",
    "ExpertParallel": "runtime.mesh.expert_parallel",
    "LossSum": "api.loss_sum",
    "MeshDegrees": "runtime.mesh.mesh_degrees",
    "PendingEvaluation": "runtime.execution.evaluation",
    "Pipeline": "automatic",
    "SameModel": "verification.same_model",
    "Skip": "api.skip",
    "Step": "runtime.execution.step",
    "TensorParallel": "runtime.mesh.tensor_parallel",
    "TokenBalance": "api.experts",
    "add_loss": "api.aux_loss",
    "added_losses": "api.aux_loss",
    "attend": "api.attention",
    "combine": "api.experts",
    "compare": "planning.scheme_comparison",
    "dispatch": "api.experts",
    "grouped_linear": "api.experts",
    "launch": "runtime.workers.launch",
    "layers": "capture",
    "limit_capacity": "api.experts",
    "load_checkpoint": "checkpoints",
    "load_weights": "checkpoints",
    "memory": "runtime.counted_memory",
    "models": "",
    "next_target": "api.loss_sum",
    "plan": "verbs",
    "predict": "verbs",
    "profile": "verbs",
    "same_model": "verification.same_model",
    "save_checkpoint": "checkpoints",
    "sum_over_copies": "api.counters",
    "train": "verbs",
    "verify": "verbs",
    "whole_target": "api.loss_sum",
}
"""For each name that needs torch or loads slowly, the module that defines it; empty: the name is a package.
"""


def __dir__() -> list[str]:
    """All public names, including those of ``_LATE``."""
    return sorted([*__all__, "__version__"])


__getattr__ = attributes(__name__, _LATE)
