"""Dispatch to experts and back in one process, beside the plain loop over experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.api.torch_internals import grouped_product

D = torch.float64


def by_loop(tokens: Tensor, choices: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """Experts one after the other, as a reference."""
    output = torch.zeros(tokens.shape[0], matrices.shape[2], dtype=tokens.dtype)
    for expert, matrix in enumerate(matrices):
        token, place = (choices == expert).nonzero(as_tuple=True)
        output = output.index_add(0, token, weights[token, place, None] * (tokens[token] @ matrix))
    return output


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 7), experts=st.integers(1, 5), k=st.integers(1, 3), seed=st.integers(0, 2**16),
    drops=st.booleans(),
)  # fmt: skip
def test_dispatch_and_combine_are_the_loop_over_experts(
    *, count: int, experts: int, k: int, seed: int, drops: bool
) -> None:
    """Values and gradients, with experts without tokens, tokens without experts, and no tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, 3, dtype=D, generator=generator, requires_grad=True)
    matrices = torch.randn(experts, 3, 2, dtype=D, generator=generator, requires_grad=True)
    weights = torch.rand(count, k, dtype=D, generator=generator, requires_grad=True)
    choices = torch.randint(-1 if drops else 0, experts, (count, k), generator=generator)
    sent = cf.dispatch(tokens, choices, matrices)
    assert sent.counts.sum() == (choices >= 0).sum() == len(sent.rows)
    output = cf.combine(sent, cf.grouped_linear(sent.rows, matrices, sent.counts), weights)
    expected = by_loop(tokens, choices, weights, matrices)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    leaves = (tokens, matrices, weights)
    gradients, wanted = (
        torch.autograd.grad(y.square().sum(), leaves, allow_unused=True) for y in (output, expected)
    )
    for gradient, want in zip(gradients, wanted, strict=True):
        assert gradient is not None
        zero = torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, zero if want is None else want, rtol=1e-12, atol=1e-12)


def test_bias_and_layout_of_the_matrices() -> None:
    rows, weight = torch.randn(4, 3, dtype=D), torch.randn(2, 5, 3, dtype=D)
    bias, counts = torch.randn(2, 5, dtype=D), torch.tensor([1, 3])
    output = cf.grouped_linear(rows, weight, counts, bias, transposed=True)
    expected = [
        functional.linear(rows[:1], weight[0], bias[0]),
        functional.linear(rows[1:], weight[1], bias[1]),
    ]
    torch.testing.assert_close(output, torch.cat(expected))


def test_the_kernel_is_taken_on_gpus_for_bfloat16_alone() -> None:
    rows, matrices, counts = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([1, 3])
    assert grouped_product(rows, matrices, counts) is None
    assert grouped_product(rows.bfloat16(), matrices.bfloat16(), counts) is None, "on the CPU"


def test_products_are_added_in_the_wider_dtype_and_rounded_once() -> None:
    tokens = torch.ones(1, 1, dtype=torch.bfloat16)
    sent = cf.dispatch(tokens, torch.tensor([[0, 1]]), 2)
    outputs = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    combined = cf.combine(sent, outputs, torch.tensor([[1.0, 1.0]]))
    assert combined.dtype is torch.bfloat16
    assert combined.item() == torch.tensor(257.0).bfloat16().item()


def test_capacity_drops_later_tokens_and_second_choices_first() -> None:
    choices = torch.tensor([[0, 1], [0, 1], [1, 0], [2, 0]])
    assert cf.limit_capacity(choices, 3, 2).tolist() == [[0, 1], [0, -1], [1, -1], [2, -1]]
    assert cf.limit_capacity(choices, 3, 8).tolist() == choices.tolist()
    again = cf.limit_capacity(cf.limit_capacity(choices, 3, 2), 3, 1)
    assert again.tolist() == [[0, -1], [-1, -1], [1, -1], [2, -1]]


def test_a_balance_evens_out_tokens_and_counts_in_training_alone() -> None:
    """Scores favour expert 0; after some updates each has its share."""
    torch.manual_seed(0)
    balance = cf.TokenBalance(4, rate=0.05)
    scores = torch.rand(400, 4)
    scores[:, 0] += 0.5
    balance.eval()
    balance(scores, 2)
    assert balance.tokens.sum() == 0
    balance.train().to(torch.bfloat16)
    assert balance.bias.dtype is torch.float32
    before = torch.bincount(balance(scores, 2).flatten(), minlength=4)
    assert balance.tokens.tolist() == before.tolist()
    assert before[0] > 350
    for _ in range(40):
        balance.update()
        choices = balance(scores, 2)
    assert balance.bias.mean().abs() < 1e-6
    shares = torch.bincount(choices.flatten(), minlength=4)
    assert shares.max() - shares.min() < 60


class _Layer(nn.Module):
    """Tokens to two of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3, dtype=D)
        self.matrices = nn.Parameter(torch.randn(3, 4, 4, dtype=D))
        self.balance = cf.TokenBalance(3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        choices = cf.limit_capacity(self.balance(scores, 2), 3, 9)
        sent = cf.dispatch(tokens, choices, self.matrices)
        outputs = cf.grouped_linear(sent.rows, self.matrices, sent.counts)
        return x + cf.combine(sent, outputs, scores.gather(1, choices.clamp(min=0))).view_as(x)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_layers_are_found_around_the_functions_of_experts() -> None:
    """A recording has no values; it notes each function as one step."""
    torch.manual_seed(0)
    network, x = _Network(), torch.randn(3, 5, 4, dtype=D)
    found = nn.Sequential(*cf.layers(network, example=x[:2]))
    torch.testing.assert_close(found(x), network(x), rtol=0, atol=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    tokens, choices = torch.ones(3, 2), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(cf.ConfigError, match=r"tokens of shape \(3, 2\) and choices of shape \(2, 1\)"):
        cf.dispatch(tokens, choices[:2], 2)
    sent = cf.dispatch(tokens, choices, 2)
    with pytest.raises(cf.ConfigError, match=r"outputs of shape \(2, 2\) for 3 rows"):
        cf.combine(sent, tokens[:2])
    with pytest.raises(cf.ConfigError, match=r"weights of shape \(3, 2\) for choices of shape \(3, 1\)"):
        cf.combine(sent, tokens, torch.ones(3, 2))
    with pytest.raises(cf.ConfigError, match=r"counts of shape \(2,\) for 3 local experts"):
        cf.grouped_linear(tokens, torch.ones(3, 2, 2), sent.counts)
