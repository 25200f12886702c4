"""Base of passes that run their unit in another pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from .passes import StagePass


class WrappingPass(StagePass):
    """A pass that leaves its unit's verbs to another one, but for those that a subclass overrides.

    A new verb of ``StagePass`` is forwarded here, so that it reaches the graph in whatever way the stage runs
    (``tests/runtime/stages/test_passes.py``).

    Args:
        unit_pass: the other pass.
    """

    __slots__ = ("unit_pass",)

    def __init__(self, unit_pass: StagePass) -> None:
        super().__init__(unit_pass.stage, unit_pass.rows, unit_pass.step, unit_pass.head, unit_pass.meter)
        self.unit_pass = unit_pass

    @override
    def recompute(self) -> None:
        self.unit_pass.recompute()

    @override
    def prepare(self, *, defers: bool) -> None:
        self.unit_pass.prepare(defers=defers)

    @override
    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        self.unit_pass.backward(gradients)

    @override
    def weight_gradients(self) -> None:
        self.unit_pass.weight_gradients()

    @override
    def input_gradients(self) -> list[Tensor | None]:
        return self.unit_pass.input_gradients()

    @override
    def settle(self) -> None:
        self.unit_pass.settle()

    @override
    def release(self) -> None:
        self.unit_pass.release()
