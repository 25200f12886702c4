"""Forward of a module that dispatches tokens to experts, whose parameters [experts, ...] are divided.

``expert_parameters`` names what is divided. Any other tensor or list that the forward looks up by the number
of an expert is then read by the number among the local ones. So two runs of it are compared, in which the
first local expert stands for all: one with as many as the model has, and one with as many as are local.
Nothing is exchanged.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.experts import Dispatched, local_experts
from counterflow.api.token_shares import rehearsing
from counterflow.common.tensors.dtensors import like
from counterflow.common.tensors.torch_private import parameters_of

from .compared_forward import ComparedForward


class ExpertForward(ComparedForward):
    """Forward of the module, which is compared.

    Args:
        place: stage of the module, in messages.
        module: the module.
        names: names of its parameters [experts, ...].
        experts: number of experts.
        positions: number of positions that divide them.
        position: number of this position.
    """

    whole_weights = "all experts"
    error = (
        "looks up something by the number of an expert that is not divided with the experts; name all of its "
        "parameters [experts, ...] in expert_parameters, and make buffers or lists of that kind parameters "
        "without gradients"
    )

    def __init__(  # noqa: PLR0917
        self, place: str, module: nn.Module, names: list[str], experts: int, positions: int, position: int
    ) -> None:
        super().__init__(place, module)
        self._names, self._experts, self._positions = names, experts, positions
        self._first = position * (experts // positions)

    @override
    def comparable(self, arguments: Any) -> Any:
        """Return the arguments; tokens that were dispatched are as if from this position."""
        return pytree.tree_map(_at_home, arguments, is_leaf=lambda leaf: isinstance(leaf, Dispatched))

    @override
    def outputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Run the forward with as many experts as the model has, and as are local, all of them alike."""
        count = self._experts // self._positions
        table = parameters_of(self._module)
        divided = {name: cast("Tensor", table[name]) for name in self._names}
        single = {name: local_experts(weight).detach()[:1] for name, weight in divided.items()}

        def expand(number: int) -> dict[str, Tensor]:
            return {name: weight.expand(number, *weight.shape[1:]) for name, weight in single.items()}

        part = {name: like(divided[name], weight) for name, weight in expand(count).items()}
        arguments = pytree.tree_map(self._among_all, (args, kwargs))
        try:
            with rehearsing(1) as rehearsal:
                table.update(cast("Any", expand(self._experts)))
                expected = self.run(self._forward, *arguments)
            with rehearsing(self._positions):
                table.update(cast("Any", part))
                output = self.run(self._forward, args, kwargs)
        finally:
            table.update(cast("Any", divided))
        pairs = zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(arguments), strict=True)
        knows_experts = rehearsal.dispatches or any(before is not after for before, after in pairs)
        return (expected, output) if knows_experts else None

    def _among_all(self, leaf: Any) -> Any:
        # Counts of rows become those of all experts; anything else stays as it is.
        count = self._experts // self._positions
        is_count = isinstance(leaf, Tensor) and leaf.shape == (count,) and not leaf.is_floating_point()
        if not is_count or leaf.is_complex() or leaf.dtype is torch.bool:
            return leaf
        rows = leaf.new_zeros(self._experts)
        rows[self._first : self._first + count] = leaf
        return rows


def _at_home(leaf: Any) -> Any:
    if not isinstance(leaf, Dispatched):
        return leaf
    places = torch.arange(leaf.rows.shape[0], device=leaf.rows.device)
    return Dispatched(leaf.rows, leaf.counts, places[:, None], places, places, None, None)
