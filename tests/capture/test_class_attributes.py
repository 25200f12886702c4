"""Changes between two steps of classes, of modules in packages, and of functions themselves count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf

PACKAGE, INNER = ModuleType("package"), ModuleType("package.inner")
PACKAGE.inner = INNER  # type: ignore[attr-defined]
INNER.factor = 1.0  # type: ignore[attr-defined]


class Meta(type):
    of_meta = 1.0


class Base(metaclass=Meta):
    of_base, of_cls, of_static, of_own = 1.0, 1.0, 1.0, 1.0
    table: list[float] = [1.0]  # noqa: RUF012 - of the class


class Config(Base):
    direct, nested, method, computed = 1.0, 1.0, 1.0, 1.0

    @classmethod
    def times_cls(cls, x: Tensor) -> Tensor:
        return x * cls.of_cls

    @staticmethod
    def times_static(x: Tensor) -> Tensor:
        return x * Config.of_static

    def times_own(self, x: Tensor) -> Tensor:
        return x * self.of_own

    def replaced(self, x: Tensor) -> Tensor:
        return x

    class Inner:
        factor = 1.0


class Values:
    def __iter__(self) -> Any:
        return iter(ITERATED.values())


class Numbers(dict[str, float]):
    scale = 1.0


INNER.Config = Config  # type: ignore[attr-defined]
CONFIG, ITERATED, NUMBERS = Config(), {"factor": 1.0}, Numbers()


def with_default(x: Tensor, factor: float = 1.0) -> Tensor:
    return x * factor


def coded(x: Tensor) -> Tensor:
    return x


def attributed(x: Tensor) -> Tensor:
    return x * getattr(attributed, "factor", 1.0)


def multiplies(by: list[float]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return x * by[0]

    return function


def half(x: Tensor) -> Tensor:
    return 0.5 * x


def same(x: Tensor) -> Tensor:
    return x


class Parent(nn.Module):
    of_parent = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * PARENT["factor"]


PARENT = {"factor": 1.0}
MULTIPLIERS = [[1.0], [1.0], [1.0]]


class Net(Parent):
    gain, second_gain = 1.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.config, self.kind = Config(), Config
        self.functions = [multiplies(by) for by in MULTIPLIERS]
        self.choice = [half, same, half]

    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x) * super().of_parent

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = x * self.config.direct * CONFIG.nested * getattr(CONFIG, "com" + "puted")
        x = x * type(self).gain * self.__class__.second_gain * getattr(type(self), "late", 1.0)
        x = CONFIG.times_cls(self.config.times_static(CONFIG.times_own(CONFIG.replaced(x))))
        x = x * CONFIG.of_base * Config.of_meta * CONFIG.table[0] * self.kind.Inner.factor * NUMBERS.scale
        x = x * PACKAGE.inner.factor * PACKAGE.inner.Config.method * getattr(PACKAGE.inner, "late", 1.0)
        x = attributed(coded(with_default(x))) * min(Values())
        for function in (*self.functions, *self.choice):
            x = function(x)
        return self.scaled(x)


def replace_method(_: Net) -> None:
    Config.replaced = lambda self, x: 0.9 * x  # type: ignore[method-assign]  # noqa: ARG005


CHANGES: dict[str, Callable[[Net], object]] = {
    "nothing": lambda _: None,
    "class of an attribute": lambda _: setattr(Config, "direct", 0.9),
    "class of a global": lambda _: setattr(Config, "nested", 0.9),
    "attribute over that of the class": lambda m: setattr(m.config, "direct", 1.1),
    "computed name": lambda _: setattr(Config, "computed", 0.9),
    "type": lambda _: setattr(Net, "gain", 0.9),
    "__class__": lambda _: setattr(Net, "second_gain", 0.9),
    "attribute that did not exist": lambda _: setattr(Net, "late", 0.9),
    "class method": lambda _: setattr(Base, "of_cls", 0.9),
    "subclass in a class method": lambda _: setattr(Config, "of_cls", 0.8),
    "static method": lambda _: setattr(Config, "of_static", 0.9),
    "method": lambda _: setattr(Base, "of_own", 0.9),
    "replaced method": replace_method,
    "base": lambda _: setattr(Base, "of_base", 0.9),
    "metaclass": lambda _: setattr(Meta, "of_meta", 0.9),
    "list of a base": lambda _: Base.table.__setitem__(0, 0.9),
    "class in a class": lambda _: setattr(Config.Inner, "factor", 0.9),
    "class of a dict": lambda _: setattr(Numbers, "scale", 0.9),
    "module in a package": lambda _: setattr(INNER, "factor", 0.9),
    "class in a module in a package": lambda _: setattr(Config, "method", 0.9),
    "name that a module in a package did not have": lambda _: setattr(INNER, "late", 0.9),
    "attribute of a function": lambda _: setattr(attributed, "factor", 0.9),
    "defaults of a function": lambda _: setattr(with_default, "__defaults__", (0.9,)),
    "code of a function": lambda _: setattr(coded, "__code__", half.__code__),
    "operator": lambda _: ITERATED.update(factor=0.9),
    "first of three closures": lambda _: MULTIPLIERS[0].__setitem__(0, 0.9),
    "second of three closures": lambda _: MULTIPLIERS[1].__setitem__(0, 0.9),
    "function that is in the list already": lambda m: m.choice.__setitem__(2, same),
    "method of a base": lambda _: PARENT.update(factor=0.9),
    "attribute by super": lambda _: setattr(Parent, "of_parent", 0.9),
}


def reset() -> None:
    """Undo the changes."""
    for name in ("direct", "nested", "computed", "of_static", "method"):
        setattr(Config, name, 1.0)
    for owner, name in ((Config, "of_cls"), (Net, "late"), (INNER, "late"), (attributed, "factor")):
        if name in vars(owner):
            delattr(owner, name)
    for name in ("of_cls", "of_own", "of_base"):
        setattr(Base, name, 1.0)
    for name in ("gain", "second_gain"):
        setattr(Net, name, 1.0)
    Meta.of_meta = Config.Inner.factor = Numbers.scale = Parent.of_parent = 1.0
    Config.of_static, Base.table[0], INNER.factor = 1.0, 1.0, 1.0  # type: ignore[attr-defined]
    Config.replaced = REPLACED  # type: ignore[method-assign]
    with_default.__defaults__, coded.__code__ = (1.0,), CODE
    ITERATED["factor"] = PARENT["factor"] = 1.0
    for by in MULTIPLIERS:
        by[0] = 1.0


REPLACED, CODE = Config.replaced, coded.__code__


def sample(number: int) -> Tensor:
    return torch.randn((4, 8), generator=torch.Generator().manual_seed(number))


def work() -> dict[str, float]:
    torch.manual_seed(0)
    reset()
    model, losses = Net(), {}
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    scheme = "dapple(stages=1, micro_batches=1)"
    with cf.Pipeline(
        model, nn.MSELoss(), scheme, optimizer=optimizer, example=sample(0), witness_every=0
    ) as pipeline:
        for step, (name, change) in enumerate(CHANGES.items()):
            change(model)
            losses[name] = pipeline.step(sample(step), sample(step + 100)).loss
    return losses


def test_what_changes_on_classes_modules_and_functions_counts() -> None:
    losses = cf.launch(work, workers=1, transport="local")[0]
    reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for step, (name, change) in enumerate(CHANGES.items()):
            change(model)
            optimizer.zero_grad()
            loss = functional.mse_loss(model(sample(step)), sample(step + 100))
            loss.backward()
            optimizer.step()
            assert losses[name] == pytest.approx(loss.item(), rel=1e-5), name
    finally:
        reset()
