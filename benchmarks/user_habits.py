"""What users do between two steps of a training, and around them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import user_models
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from user_models import FEATURES
from user_runs import Case, Program, Trainer


@dataclass(frozen=True)
class Site:
    """Where a habit acts: the program, its trainer, and a block that was drawn."""

    program: Program
    trainer: Trainer
    step: int

    @property
    def block(self) -> Any:
        blocks = self.program.usual
        return blocks[self.program.case.pick % len(blocks)]


@dataclass(frozen=True)
class Habit:
    """Something that a user does.

    Attributes:
        act: what is done once.
        around: what is entered around the step from then on.
        needs: of which cases it may be drawn.
        single: whether it needs weights in float32.
        by_worker: whether each thread does it, also where threads have one model.
    """

    act: Callable[[Site], Any] | None = None
    around: Callable[[], Any] | None = None
    needs: Callable[[Case], bool] = lambda _case: True
    single: bool = False
    by_worker: bool = False


HABITS: dict[str, Habit] = {}


class Doubling(TorchFunctionMode):
    """A mode of the user's that changes what a function of torch gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.tanh else found


def _halved(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
    return output * 0.5


def _raised(_module: nn.Module, given: Any) -> Any:
    return (given[0] + 0.1,)


def _gradient(_module: nn.Module, given: Any, _output: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in given)


def _set_weights(parameters: Any, change: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if not parameter.is_meta:
                change(parameter)


def _seeded(shape: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 3


def _bias(module: Any) -> nn.Parameter:
    """Another bias, also where the module's own lives on another worker."""
    return nn.Parameter(torch.full((module.out_features,), 0.2, dtype=module.bias.dtype))


def _patched(block: Any) -> None:
    own = type(block).forward
    block.forward = MethodType(lambda self, x: own(self, x) * 0.5, block)


def _place(site: Site, new: nn.Module) -> None:
    """Put another module where a block is in the user's model."""
    blocks, model = site.program.usual, site.program.model
    block = blocks[site.program.case.pick % len(blocks)]
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is block:
                parent._modules[name] = new


def _captured(case: Case) -> bool:
    return case.captured


def _plain_loss(case: Case) -> bool:
    return case.loss in {"mean of squares", "cross entropy", "mean by hand"} and not case.any("in_order")


def _accumulates(case: Case) -> bool:
    later = any(name in ("smaller mini-batch", "longer sequences") for _, name in case.habits)
    return _plain_loss(case) and case.synchronous and not later


def _hook_of_all(_site: Site) -> None:
    def hook(module: nn.Module, _given: Any, output: Any) -> Any:
        return output * 1.5 if isinstance(module, nn.Linear) else output

    if not user_models.GLOBAL_HOOKS:
        user_models.GLOBAL_HOOKS.append(nn.modules.module.register_module_forward_hook(hook))


HABITS |= {
    "gain of a block": Habit(lambda s: setattr(s.block, "gain", 0.1)),
    "eval of a block": Habit(lambda s: s.block.eval()),
    "eval of the model": Habit(lambda s: s.program.model.eval()),
    "train and eval": Habit(lambda s: (s.program.model.eval(), s.program.model.train())),
    "forward hook": Habit(lambda s: s.block.register_forward_hook(_halved)),
    "forward hook of a linear": Habit(lambda s: s.block.up.register_forward_hook(_halved)),
    "forward pre-hook": Habit(lambda s: s.block.register_forward_pre_hook(_raised)),
    "backward hook": Habit(lambda s: s.block.register_full_backward_hook(_gradient)),
    "hook that only looks": Habit(lambda s: s.block.register_forward_hook(lambda *_: None)),
    "block replaced": Habit(lambda s: _place(s, nn.Identity())),
    "forward replaced": Habit(lambda s: _patched(s.block)),
    "submodule replaced": Habit(lambda s: setattr(s.block, "up", nn.Sequential(s.block.up, nn.Tanh()))),
    "weights clamped": Habit(
        lambda s: _set_weights(s.program.model.parameters(), lambda p: p.clamp_(-0.1, 0.1))
    ),
    "a weight zeroed": Habit(lambda s: _set_weights([s.block.up.weight], lambda p: p.zero_())),
    "a weight set through data": Habit(
        lambda s: _set_weights([s.block.up.weight], lambda p: p.data.copy_(_seeded(p.shape)))
    ),
    "data of a weight replaced": Habit(
        lambda s: _set_weights(
            [s.block.up.weight], lambda p: setattr(p, "data", _seeded(p.shape).to(p.dtype))
        )
    ),
    "a parameter replaced": Habit(lambda s: setattr(s.block.up, "bias", _bias(s.block.up))),
    "block frozen": Habit(lambda s: s.block.requires_grad_(False)),
    "frozen by name": Habit(
        lambda s: s.trainer.set_trainable(lambda n: not n.endswith("bias")),
        needs=lambda c: "teacher" not in c.features,
    ),
    "rate": Habit(lambda s: s.trainer.set_rate("lr", 0.1)),
    "weight decay": Habit(lambda s: s.trainer.set_rate("weight_decay", 0.5)),
    "optimizer's state cleared": Habit(lambda s: s.trainer.forget()),
    "step without an update": Habit(lambda s: s.trainer.accumulate(s.step), needs=_accumulates),
    "longer sequences": Habit(needs=lambda c: c.tokens),
    "hook of all modules": Habit(_hook_of_all),
    "state read": Habit(lambda s: s.trainer.state()),
    "state loaded": Habit(
        lambda s: s.trainer.load(
            {n: v * 0.5 if v.is_floating_point() else v for n, v in s.trainer.state().items()}
        ),
        needs=lambda c: not c.tied and not c.repeat and not c.shared,
    ),
    "evaluation": Habit(lambda s: s.trainer.evaluate(s.step, "between")),
    "prediction": Habit(lambda s: s.trainer.predict(s.step, "between")),
    "prediction without gradients": Habit(lambda s: _within(torch.no_grad(), s)),
    "prediction in inference mode": Habit(lambda s: _within(torch.inference_mode(), s)),
    "prediction with gradients": Habit(lambda s: _within(torch.enable_grad(), s)),
    "new training": Habit(lambda s: s.trainer.renew(), needs=lambda c: not c.model_outside),
    "model copied": Habit(lambda s: copy.deepcopy(s.program.model), needs=lambda c: "lock" not in c.features),
    "seeds set": Habit(lambda _: (torch.manual_seed(3), random.seed(3))),
    "caught error": Habit(lambda s: s.trainer.failing_step(s.step, "error"), needs=_plain_loss),
    "caught infinite loss": Habit(lambda s: s.trainer.failing_step(s.step, "inf"), needs=_plain_loss),
    "caught wrong targets": Habit(lambda s: s.trainer.failing_step(s.step, "targets"), needs=_plain_loss),
    "clip_norm of the pipeline": Habit(lambda s: s.trainer.set_option("clip_norm", 1e-3)),
    "smaller mini-batch": Habit(),
    "depth": Habit(lambda s: setattr(s.program.model, "depth", 3), needs=_captured),
    "block appended": Habit(
        lambda s: (
            s.program.model.blocks.append(nn.Tanh())
            if len(s.program.model.blocks) == len(s.program.case.blocks)
            else None
        ),  # type: ignore
        needs=lambda c: c.captured and c.container == "tensor" and not c.model_outside,
    ),
    "weight of the loss": Habit(
        lambda s: setattr(s.program.loss, "weight", 0.5), needs=lambda c: c.loss == "annealed"
    ),
    "autocast around": Habit(around=lambda: torch.autocast("cpu", torch.bfloat16), single=True),
    "anomaly mode around": Habit(
        around=lambda: torch.autograd.set_detect_anomaly(mode=True, check_nan=False)
    ),
    "saved tensors elsewhere": Habit(around=torch.autograd.graph.save_on_cpu),
    "a mode of functions around": Habit(around=Doubling),
    "device context around": Habit(around=lambda: torch.device("cpu")),
}


for _name, _habit in list(HABITS.items()):
    if _habit.act is not None and {"trainer", "_within", "manual_seed"} & {*_habit.act.__code__.co_names}:
        HABITS[_name] = replace(_habit, by_worker=True)


def _within(context: Any, site: Site) -> None:
    with context:
        site.trainer.predict(site.step, "between")


def possible(case: Case) -> tuple[list[str], list[str]]:
    """Habits that a case may have: those of its features, and the others."""
    own = [f"{feature}: {name}" for feature in case.features for name in FEATURES[feature].habits]
    usual = [
        name for name, habit in HABITS.items() if habit.needs(case) and (not habit.single or case.single)
    ]
    return own, usual


def act(name: str, program: Program, trainer: Trainer, step: int) -> None:
    """Do what a habit does."""
    if name in HABITS:
        habit = HABITS[name]
        if habit.act is None:
            return
        if habit.by_worker:
            habit.act(Site(program, trainer, step))
            return
        with program.turn:
            if program.first(step, name):
                habit.act(Site(program, trainer, step))
        return
    feature, _, own = name.partition(": ")
    with program.turn, torch.no_grad():
        if program.first(step, name) or feature == "context variable":
            FEATURES[feature].habits[own](program.owner(feature), program.config)


def around(name: str, stack: ExitStack) -> None:
    """Enter what a habit has around the step."""
    habit = HABITS.get(name)
    if habit is not None and habit.around is not None:
        stack.enter_context(habit.around())
