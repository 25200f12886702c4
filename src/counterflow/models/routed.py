"""A feed-forward layer of routed experts: each token passes a few of them, which a router chooses.

Invariant: nothing is dropped, and the result depends on no other token. Tokens are evened out by a bias of
the choice (``TokenBalance``), without a loss.

Source: Fedus et al., Switch Transformers (arXiv 2101.03961); Wang et al., Auxiliary-Loss-Free Load Balancing
(arXiv 2408.15664).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.api.experts import TokenBalance, combine, dispatch, grouped_linear

from .parts import INITIAL_DEVIATION, Projection, draw


class RoutedFeedForward(nn.Module):
    """Experts with two linear maps and a GELU each, at four times the width, and their router.

    Args:
        hidden: width of a position's vector.
        experts: number of experts.
        chosen: experts of each token.
        deviations: standard deviations of the fresh weights of the first map, and of the second.
    """

    expert_parameters = ("expand", "contract")

    def __init__(
        self,
        hidden: int,
        experts: int,
        chosen: int,
        *,
        deviations: tuple[float, float] = (INITIAL_DEVIATION, INITIAL_DEVIATION),
    ) -> None:
        super().__init__()
        self.chosen, self.deviations = chosen, deviations
        self.expand = nn.Parameter(torch.empty(experts, hidden, 4 * hidden))
        self.contract = nn.Parameter(torch.empty(experts, 4 * hidden, hidden))
        self.reset_parameters()
        self.router = Projection(hidden, experts, deviations[0])
        self.balance = TokenBalance(experts)

    def reset_parameters(self) -> None:
        """Draw the experts' weights."""
        for weight, deviation in zip((self.expand, self.contract), self.deviations, strict=True):
            draw(weight, deviation)

    def forward(self, hidden: Tensor) -> Tensor:
        """[samples, positions, hidden] to the same shape."""
        tokens = hidden.flatten(0, -2)
        scores = self.router(tokens).sigmoid()
        choices = self.balance(scores, self.chosen)
        weights = scores.gather(1, choices)
        sent = dispatch(tokens, choices, self.expand)
        wide = functional.gelu(grouped_linear(sent.rows, self.expand, sent.counts), approximate="tanh")
        outputs = grouped_linear(wide, self.contract, sent.counts)
        return combine(sent, outputs, weights / weights.sum(-1, keepdim=True)).view_as(hidden)
