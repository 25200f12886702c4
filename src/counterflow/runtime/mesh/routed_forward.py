"""Forward of a module of experts on the tokens of one position's experts.

The forward of the user's module takes (hidden states [T, width], choices [T, k], weights [T, k]) and is
assumed to give the sum over k of weights times what the chosen expert makes of the token, which depends on
the parameters [experts, ...] of this expert alone. Calls 1, 2, 4, 8 … compare that: weights that are zero in
the first ones show nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.api.experts import combine, dispatch, expert_group, joined, local_experts
from counterflow.common.doubling import is_doubling
from counterflow.common.tensors.torch_private import parameters_of
from counterflow.common.tensors.unknown_values import values_unknown
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.comparison import distance
from counterflow.verification.diagnosis.tolerances import ACTIVATIONS

from .compared_forward import undisturbed

_TOKENS = 8
"""Number of tokens that are compared."""

_WEIGHTS = 0.75, 0.5
"""Weights of the two choices of each; not 1 in sum, so that a forward that normalises them differs."""


class RoutedForward:
    """Forward that sends tokens to the positions of their experts, and their outputs back.

    Args:
        place: layer or stage of the module, in messages.
        module: the user's module, whose parameters are divided.
        names: names of its parameters [experts, ...].
        experts: number of experts.
    """

    def __init__(self, place: str, module: nn.Module, names: Sequence[str], experts: int) -> None:
        self._place, self._module, self._names, self._experts = place, module, [*names], experts
        self._forward: Callable[..., Tensor] = module.forward
        self._calls = 0

    def __call__(self, hidden_states: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Run the module's forward on the tokens of the local experts, each with one choice of weight 1.

        Args:
            hidden_states: [..., width].
            choices: [..., k].
            weights: [..., k].

        Returns:
            [..., width].

        Raises:
            ConfigError: the forward is not a sum over experts.
        """
        table = parameters_of(self._module)
        divided = {name: cast("Tensor", table[name]) for name in self._names}
        group = expert_group(divided[self._names[0]])
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        local = {name: local_experts(parameter) for name, parameter in divided.items()}
        if len(tokens) and not torch.compiler.is_compiling():
            self._calls += 1
            if is_doubling(self._calls):
                self._compare(tokens[:_TOKENS].detach(), choices, weights, local, dist.get_rank(group))
        k = choices.shape[-1]
        sent = dispatch(tokens, choices.reshape(-1, k), self._experts, group=group)
        rows = sent.rows
        numbers = torch.arange(len(sent.counts), device=rows.device)
        chosen = numbers.repeat_interleave(sent.counts, output_size=rows.shape[0])[:, None]
        outputs = self._forward_with(local, rows, chosen, weights.new_ones(rows.shape[0], 1))
        outputs = combine(sent, joined(outputs, *local.values()), weights.reshape(-1, k))
        return outputs.view(*hidden_states.shape[:-1], outputs.shape[-1])

    def _forward_with(self, experts: Mapping[str, Tensor], *args: Tensor) -> Tensor:
        table, module = parameters_of(self._module), cast("Any", self._module)
        divided = {name: table[name] for name in self._names}
        table.update(cast("Any", experts))
        module.num_experts = len(next(iter(experts.values())))
        try:
            return self._forward(*args)
        finally:
            table.update(divided)
            module.num_experts = self._experts

    @torch.no_grad()
    def _compare(
        self, tokens: Tensor, choices: Tensor, weights: Tensor, local: Mapping[str, Tensor], rank: int
    ) -> None:
        """Compare the sum over two experts in one call with that of one call for each.

        Both have the weights of the first local expert, under its number among all experts and the next one:
        a forward that looks up anything else by an expert's number differs.
        """
        if tokens.is_meta or values_unknown():
            return
        count = next(iter(local.values())).shape[0]
        copies = {name: tensor[:1].expand(self._experts, *tensor.shape[1:]) for name, tensor in local.items()}
        first = rank * count
        pair = choices.new_tensor([first, (first + 1) % self._experts]).expand(len(tokens), 2)
        factors = weights.new_tensor(_WEIGHTS).expand(len(tokens), 2)
        with undisturbed(self._module, tokens.device):
            try:
                expected = self._forward_with(copies, tokens.clone(), pair, factors)
            except RuntimeError:  # a kernel that needs the memory of each expert
                copies = {name: tensor.contiguous() for name, tensor in copies.items()}
                expected = self._forward_with(copies, tokens.clone(), pair, factors)
            single = self._forward_with(
                local, tokens.clone(), torch.zeros_like(pair[:, :1]), torch.ones_like(factors[:, :1])
            )
        parts = [factor * single for factor in _WEIGHTS]
        if distance(expected, sum(parts[1:], parts[0])) > ACTIVATIONS.of(expected.dtype):
            kind = type(self._module).__name__
            raise ConfigError(
                f"{self._place}: the forward of {kind} is not the sum of weight times expert(token) over the "
                "choices, or an expert depends on more than its own weights, so tokens cannot be sent to "
                "their experts around it; let it call cf.dispatch and cf.combine, with expert_parameters"
            )
