"""Tokens to the experts that a router chose for them, and back, over the positions of a mesh dimension.

::

    tokens [T, W] ── sort by expert ── exchange ── rows [R, W] of the local experts, by expert
    output [T, V] ── weighted sum over k ── exchange back ── the experts' outputs [R, V]

The group of the exchange is read from a weight of the experts: a ``DTensor`` of which each position of a mesh
dimension has some experts (``cf.ExpertParallel`` makes it), or a plain tensor of all experts, with which
nothing is exchanged. So a layer is written once, and computes the same in one process.

Positions of tensor parallelism have the same tokens. Where experts are divided over them too, each sends its
share of the tokens, and the outputs of all shares are gathered.

Invariants: the result does not depend on the number of positions, up to rounding. Every position takes part
in every exchange, of a forward and of a backward, without tokens too; and weights of experts without tokens
have gradients of 0, as in one process.

Sources: Lepikhin et al., GShard (arXiv 2006.16668); Gale et al., MegaBlocks (arXiv 2211.15841): no capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary
from typing_extensions import override

from ..common.tensors.dtensors import is_dtensor
from ..errors import ConfigError
from .counters import sum_over_copies
from .token_shares import REHEARSAL, SAME_TOKENS, TokenShare
from .torch_internals import grouped_product, is_abstract
from .turns import has_turns, next_turn


class Dispatched(NamedTuple):
    """Tokens at the experts of this position.

    Attributes:
        rows: [R, width], rows by local expert; of an expert, by the position that sent them.
        counts: [local experts], integers: rows of each local expert.
        choices: [T, k], numbers of the experts, -1 for none, as given to ``dispatch``.
        order: [S], places in ``choices`` (flattened) of the rows that this position sent, by expert.
        arrival: [R], place of each row among the rows in the order in which they were received.
        splits: rows sent to each position, and received from each; None: nothing was exchanged.
        group: group of the positions; None: this position has all experts.
        share: this position's share of the tokens; None: it sends all of them.
    """

    rows: Tensor
    counts: Tensor
    choices: Tensor
    order: Tensor
    arrival: Tensor
    splits: tuple[list[int], list[int]] | None
    group: Any
    share: TokenShare | None = None


def dispatch(tokens: Tensor, choices: Tensor, experts: Tensor | int, *, group: Any = None) -> Dispatched:
    """Send each token to the experts that were chosen for it.

    Args:
        tokens: [T, width].
        choices: [T, k], integers: numbers of the experts of each token; -1 or the number of experts: none.
        experts: a weight of the experts, [experts, ...], which says who has which; or, with a group, their
            number.
        group: process group of the positions, each with as many experts, in its order; None: that of the
            weight.

    Returns:
        The rows of the local experts, for ``combine``.

    Raises:
        ConfigError: shapes do not fit, or the weight is not divided by experts.

    >>> tokens = torch.tensor([[1.0], [2.0], [3.0]])
    >>> choices = torch.tensor([[1], [0], [1]])
    >>> dispatched = dispatch(tokens, choices, torch.ones(2, 1, 1))
    >>> dispatched.rows.flatten().tolist(), dispatched.counts.tolist()
    ([2.0, 1.0, 3.0], [1, 2])
    >>> combine(dispatched, 10 * dispatched.rows, torch.full((3, 1), 0.5)).flatten().tolist()
    [5.0, 10.0, 15.0]
    """
    if has_torch_function_unary(tokens):  # a recording notes it as one step
        result: Dispatched = handle_torch_function(dispatch, (tokens,), tokens, choices, experts, group=group)
        return result
    count = experts if isinstance(experts, int) else experts.shape[0]
    rehearsal = REHEARSAL.get()
    if rehearsal is not None:
        group = None
    elif group is None and isinstance(experts, Tensor):
        group = expert_group(experts)
    token_group = None if group is None else SAME_TOKENS.get()
    if tokens.dim() != 2 or choices.dim() != 2 or choices.shape[0] != tokens.shape[0]:
        raise ConfigError(
            f"dispatch: tokens of shape {(*tokens.shape,)} and choices of shape {(*choices.shape,)}; give "
            "[tokens, width] and [tokens, k]"
        )
    share, flat = None, choices.reshape(-1)
    if token_group is not None:
        share = TokenShare.of(token_group, tokens.shape[0])
        tokens, flat = share.part(tokens), choices[share.first : share.end].reshape(-1)
    if rehearsal is not None:
        flat, count = rehearsal.numbers(flat, count)
    places = flat.argsort(stable=True)
    chosen = (flat >= 0) & (flat < count)
    # Without values the number of rows is that of all choices.
    order = places if is_abstract(tokens) else places[chosen[places]]
    sent_counts = _histogram(flat[order], count)
    sent = tokens[order // max(1, choices.shape[1])]
    if group is None:
        arrival = torch.arange(len(order), device=tokens.device)
        return Dispatched(sent, sent_counts, choices, order, arrival, None, None)
    positions = dist.get_world_size(group)
    if count % positions:
        raise ConfigError(f"{count} experts cannot be divided among {positions} positions of the mesh")
    received_counts = torch.empty_like(sent_counts)
    _all_to_all(received_counts, sent_counts, None, None, group)
    by_position = torch.stack([sent_counts, received_counts]).view(2, positions, -1)
    send_splits, receive_splits = by_position.sum(2).tolist()  # the host has to know sizes
    splits = send_splits, receive_splits
    rows = cast("Tensor", _Exchange.apply(sent, *splits, group))  # type: ignore[no-untyped-call]
    local = torch.arange(count // positions, device=tokens.device).repeat(positions)
    arrival = local.repeat_interleave(received_counts, output_size=sum(receive_splits)).argsort(stable=True)
    return Dispatched(rows[arrival], by_position[1].sum(0), choices, order, arrival, splits, group, share)


def combine(dispatched: Dispatched, outputs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the experts' outputs to the tokens, and add up those of each token, in the order of its choices.

    Args:
        dispatched: what ``dispatch`` returned.
        outputs: [R, width], outputs of the rows.
        weights: [T, k], weights of the choices; None: 1.

    Returns:
        [T, width]; 0 for a token without experts. Products and sums are of the wider of both dtypes, and
        rounded to that of the outputs once.

    Raises:
        ConfigError: shapes do not fit.
    """
    if has_torch_function_unary(outputs):
        return handle_torch_function(combine, (outputs,), dispatched, outputs, weights)
    rows, _, choices, order, arrival, splits, group, share = dispatched
    if outputs.dim() != 2 or outputs.shape[0] != rows.shape[0]:
        raise ConfigError(
            f"combine: outputs of shape {(*outputs.shape,)} for {rows.shape[0]} rows; give [rows, width]"
        )
    if weights is not None and weights.shape != choices.shape:
        raise ConfigError(
            f"combine: weights of shape {(*weights.shape,)} for choices of shape {(*choices.shape,)}"
        )
    if group is not None:
        outputs = joined(outputs, rows)
        outputs = torch.empty_like(outputs).index_copy(0, arrival, outputs)
        send, receive = cast("tuple[list[int], list[int]]", splits)
        outputs = cast("Tensor", _Exchange.apply(outputs, receive, send, group))  # type: ignore[no-untyped-call]
    if share is not None:
        choices = choices[share.first : share.end]
        weights = None if weights is None else share.part(weights)
    width = outputs.shape[1]
    back = outputs.new_zeros(choices.numel(), width).index_copy(0, order, outputs).view(*choices.shape, width)
    total = back.sum(1) if weights is None else (back * weights[..., None]).sum(1).to(outputs.dtype)
    return total if share is None else share.all_tokens(total)


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Apply to the rows of each expert this expert's matrix.

    One grouped product if the device and the dtype have it (``torch.nn.functional.grouped_mm``), otherwise a
    product for each expert.

    Args:
        rows: [R, in], by expert.
        weight: [experts, in, out], or with ``transposed`` [experts, out, in]; plain or a ``DTensor``.
        counts: [local experts], rows of each.
        bias: [experts, out]; None: none.
        transposed: True if the matrices are as those of ``nn.Linear``.

    Returns:
        [R, out].

    >>> weight = torch.tensor([[[1.0]], [[10.0]]])
    >>> grouped_linear(torch.ones(3, 1), weight, torch.tensor([1, 2])).flatten().tolist()
    [1.0, 10.0, 10.0]
    """
    if has_torch_function_unary(rows):  # a recording notes it as one step, which has no values
        return handle_torch_function(
            grouped_linear, (rows,), rows, weight, counts, bias, transposed=transposed
        )
    matrices = local_experts(weight)
    if transposed:
        matrices = matrices.mT
    if is_abstract(rows):
        return rows @ matrices[0]
    if counts.shape != matrices.shape[:1]:
        raise ConfigError(
            f"grouped_linear: counts of shape {(*counts.shape,)} for {matrices.shape[0]} local experts; give "
            "those that dispatch returned for this weight"
        )
    # In a rehearsal all matrices are one, which kernels do not take.
    is_one_matrix = matrices.shape[0] > 1 and not matrices.stride(0)
    outputs = rows @ matrices[0] if is_one_matrix else grouped_product(rows, matrices, counts)
    if outputs is None:
        products = [part @ matrix for part, matrix in zip(rows.split(counts.tolist()), matrices, strict=True)]
        outputs = torch.cat(products)
    if bias is not None:
        outputs = outputs + local_experts(bias).repeat_interleave(counts, 0, output_size=rows.shape[0])
    return outputs


def limit_capacity(choices: Tensor, experts: int, capacity: int) -> Tensor:
    """Drop choices beyond the capacity of an expert: its first tokens keep it, in their order.

    It is of one position's micro-batch, so a limited layer depends on how samples are grouped.

    Args:
        choices: [T, k], numbers of experts; first choices of all tokens go before second ones.
        experts: number of experts.
        capacity: rows that an expert takes at most.

    Returns:
        The choices, with -1 for a dropped one.

    >>> limit_capacity(torch.tensor([[0, 1], [0, 1], [0, 2]]), 3, 2).tolist()
    [[0, 1], [0, 1], [-1, 2]]
    """
    if has_torch_function_unary(choices):
        return handle_torch_function(limit_capacity, (choices,), choices, experts, capacity)
    if is_abstract(choices):
        return choices.clone()
    flat = choices.t().reshape(-1)
    order = flat.argsort(stable=True)
    counts = _histogram(flat[flat >= 0], experts)
    starts = (flat < 0).sum() + counts.cumsum(0) - counts
    ranks = torch.empty_like(flat)
    ranks[order] = torch.arange(len(flat), device=flat.device) - starts[flat[order].clamp(min=0)]
    return flat.where(ranks < capacity, -1).view(*choices.t().shape).t()


def _histogram(numbers: Tensor, count: int) -> Tensor:
    # As torch.bincount, of a shape that no value decides.
    zeros = torch.zeros(count, dtype=torch.int64, device=numbers.device)
    return zeros.index_add(0, numbers, torch.ones_like(numbers, dtype=torch.int64))


def local_experts(weight: Tensor) -> Tensor:
    """The experts of this position: a part of a ``DTensor``, with its graph; all of a plain tensor."""
    return cast("Tensor", cast("Any", weight).to_local()) if is_dtensor(weight) else weight


def expert_group(weight: Tensor) -> Any:
    """Process group whose positions have other experts of a weight each; None for a plain tensor.

    Raises:
        ConfigError: the weight is divided in another way.
    """
    if not is_dtensor(weight):
        return None
    known = cast("Any", weight)
    dims = [number for number, placement in enumerate(known.placements) if placement.is_shard(0)]
    if len(dims) != 1:
        raise ConfigError(
            f"a weight of experts of shape {(*weight.shape,)} is laid out as {known.placements}; let "
            "cf.ExpertParallel divide it by its first dimension, over one dimension of the mesh"
        )
    return known.device_mesh.get_group(dims[0])


def joined(outputs: Tensor, *tensors: Tensor) -> Tensor:
    """Outputs without rows whose backward reaches the tensors with gradients of 0; others as they are.

    A position whose experts have no token would otherwise take no part in the exchange of the backward.
    """
    if outputs.shape[0] or not torch.is_grad_enabled():
        return outputs
    for tensor in tensors:
        if tensor.requires_grad:
            flat = local_experts(tensor).reshape(-1)
            outputs = outputs + (flat.new_zeros(0, flat.numel()) @ flat)[:, None].to(outputs.dtype)
    return outputs


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
    output = rows.new_empty(sum(receive), *rows.shape[1:])
    _all_to_all(output, rows.contiguous(), [*receive], [*send], group)
    return output


def _all_to_all(
    output: Tensor, rows: Tensor, receive: list[int] | None, send: list[int] | None, group: Any
) -> None:
    if not has_turns():
        dist.all_to_all_single(output, rows, receive, send, group=group)
        return
    work = dist.all_to_all_single(output, rows, receive, send, group=group, async_op=True)
    next_turn()  # an op that runs at once with this one computes in the meantime
    work.wait()


class TokenBalance(nn.Module):
    """Bias of a router's choice that evens out the tokens of its experts, without a loss.

    ``forward`` chooses by score plus bias and counts the chosen experts. After each update the bias of an
    expert with fewer tokens than the mean rises by ``rate``, that of one with more falls by it. A pipeline
    counts each token of a mini-batch once, also with recomputation, over all copies of the layer and all
    positions with samples, and calls ``update`` once an update; in one process call it after the optimizer's
    step. Evaluations count nothing. Bias and counts are buffers and are saved in checkpoints.

    Args:
        experts: number of experts.
        rate: step of the bias.

    Attributes:
        bias: [experts], float32, in whatever dtype the model is; its mean is 0.
        tokens: [experts], int64: choices of each expert since the last update.

    Source: Wang et al., Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1.

    >>> balance = TokenBalance(2, rate=0.1)
    >>> scores = torch.tensor([[0.6, 0.5], [0.9, 0.1]])
    >>> balance(scores, 1).tolist()
    [[0], [0]]
    >>> balance.update(); balance.bias.tolist()
    [-0.10000000149011612, 0.10000000149011612]
    >>> balance(scores, 1).tolist()
    [[1], [0]]
    """

    bias: Tensor
    tokens: Tensor

    def __init__(self, experts: int, rate: float = 0.001) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("tokens", torch.zeros(experts, dtype=torch.int64))
        sum_over_copies(self, "tokens")

    def forward(self, scores: Tensor, k: int) -> Tensor:
        """Choose experts.

        Args:
            scores: [T, experts], scores of the router.
            k: number of experts of a token.

        Returns:
            [T, k], numbers of experts, by falling score with bias.
        """
        choices = (scores.detach() + self.bias).topk(k, dim=-1).indices
        if self.training:
            self.tokens += _histogram(choices.reshape(-1), len(self.tokens))
        return choices

    def reset_parameters(self) -> None:
        """Begin without a bias."""
        self.bias.zero_()
        self.tokens.zero_()

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        bias = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias.dtype is not torch.float32:  # steps of the bias are below the precision of bfloat16
            self.bias = bias.to(self.bias.device)
        return self

    @torch.no_grad()
    def update(self) -> None:
        """Move the bias by the tokens counted since the last update, and count anew."""
        tokens = self.tokens.double()
        change = (self.rate * (tokens.mean() - tokens).sign()).float()
        self.bias += change - change.mean()
        self.tokens.zero_()
