"""What a group does with gradients, by hand: used or not, summed, in low precision, hooked, clipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from counterflow.common.tensors.dtypes import as_real, sum_dtype
from counterflow.errors import ConfigError
from counterflow.runtime.parameters import flat_gradients, gradients
from counterflow.runtime.parameters.gradient_norms import OwnNorm, SquaredNorms, clip_factor, squared_norms
from counterflow.runtime.parameters.gradients import (
    BUCKET_BYTES,
    GradientGroup,
)
from counterflow.runtime.parameters.hooks import Hooks
from counterflow.runtime.parameters.parameter_placement import unique
from counterflow.runtime.transport.base import Group
from counterflow.runtime.transport.local import Hub

F, LOW = torch.float64, torch.bfloat16
CPU = torch.device("cpu")


def numbers(*values: complex, dtype: torch.dtype = F) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def weights(*sizes: int, dtype: torch.dtype = F) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def made(
    *parameters: nn.Parameter, group: Group | None = None, counted: bool = True, stage: int = 0
) -> GradientGroup:
    """A group of parameters ``a``, ``b``, …, to which autograd adds."""
    found = GradientGroup(dict(zip("abcdef", parameters, strict=False)), group, counted=counted, stage=stage)
    found.attach()
    return found


def backward(parameter: nn.Parameter, *values: complex) -> None:
    """A backward in which the parameter's gradient is ``values``."""
    given = numbers(*values, dtype=parameter.dtype)
    (parameter * given.conj()).sum().backward(torch.ones((), dtype=parameter.dtype))


def grads(*parameters: nn.Parameter) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


class Copies:
    """As many copies of parameters, each with a group whose gradients are summed over all."""

    def __init__(self, count: int, *sizes: int, dtype: torch.dtype = F) -> None:
        hub = Hub(count)
        self.transports = [hub.transport(rank) for rank in range(count)]
        self.weights = [weights(*sizes, dtype=dtype) for _ in range(count)]
        self.groups = [
            made(*mine, group=transport.group(range(count)))
            for mine, transport in zip(self.weights, self.transports, strict=True)
        ]

    def sum(self) -> None:
        for group, transport in zip(self.groups, self.transports, strict=True):
            group.start(transport)
        for group in self.groups:
            group.wait()

    def shown(self) -> list[list[list[float] | None]]:
        for group in self.groups:
            group.show()
        return [grads(*mine) for mine in self.weights]


def test_what_no_backward_used_has_no_gradient() -> None:
    a, b, c = weights(2, 1, 2)
    group = made(a, b, c)
    backward(a, 1, 2)
    backward(a, 3, 4)
    backward(c, 0, 0)  # used, although it is zero
    group.show()
    assert grads(a, b, c) == [[4, 6], None, [0, 0]]
    group.clear()
    backward(b, 5)
    group.show()
    assert grads(a, b, c) == [None, [5], None]
    group.clear()
    group.show()
    assert grads(a, b, c) == [None, None, None]


def test_a_mini_batch_begins_with_zeros() -> None:
    (a,) = weights(2)
    group = made(a)
    backward(a, 1, 2)
    group.clear()
    backward(a, 10, 20)
    group.show()
    assert grads(a) == [[10, 20]]


def test_a_gradient_in_place_of_the_buffers_is_taken() -> None:
    a, b, c = weights(2, 2, 2)
    group = made(a, b, c)
    for parameter in (a, b):
        backward(parameter, 1, 2)
    a.grad = numbers(7, 8)
    b.grad = None
    c.grad = numbers(5, 6)
    assert [float(norm) ** 2 for norm in group.norms()] == pytest.approx([49 + 64 + 25 + 36])
    group.show()
    assert grads(a, b, c) == [[7, 8], None, [5, 6]]
    b.grad = numbers(1, 1)  # after they were looked at nobody asks again
    group.norms()
    group.scale(2)
    group.show()
    assert grads(a, b, c) == [[14, 16], None, [10, 12]]


def test_between_steps_nobody_finds_the_buffers() -> None:
    a, b = weights(2, 1)
    group = made(a, b)
    backward(a, 1, 2)
    group.detach()
    assert grads(a, b) == [None, None]
    group.attach()
    assert grads(a, b) == [[1, 2], [0]]
    buffer = a.grad
    group.attach()
    assert a.grad is buffer


def test_copies_sum_what_any_of_them_used() -> None:
    two = Copies(2, 2, 1, 1)
    (a, _, c), (other_a, _, other_c) = two.weights
    backward(a, 1, 2)
    backward(c, 4)
    backward(other_c, 5)
    two.sum()
    assert two.shown() == [[[1, 2], None, [9]]] * 2
    for group in two.groups:
        group.clear()
    backward(other_a, 3, 4)
    two.sum()
    assert two.shown() == [[[3, 4], None, None]] * 2
    for group in two.groups:
        group.clear()
    for mine in two.weights:
        backward(mine[0], 1, 1)
        backward(mine[1], 2)
        backward(mine[2], 3)
    two.sum()
    assert two.shown() == [[[2, 2], [4], [6]]] * 2
    assert two.groups[0].nbytes == (4 + 3) * 8


class Recorder:
    """A transport that notes what is summed."""

    def __init__(self) -> None:
        self.summed: list[Tensor] = []
        self.waited = 0

    def all_reduce(self, tensor: Tensor, group: Group) -> Recorder:
        assert group == Group((0, 1), 7)
        self.summed.append(tensor)
        return self

    def wait(self) -> None:
        self.waited += 1


def sizes(recorder: Recorder) -> list[list[int]]:
    return [list(tensor.shape) for tensor in recorder.summed]


def test_sums_are_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BUCKET_BYTES == 25 * 1024 * 1024
    pair = Group((0, 1), 7)
    parameters = [*weights(3, 3), *weights(5, dtype=torch.float32), *weights(2, dtype=torch.complex128)]
    # With one number a parameter for whether it was used: 8 of 8 bytes, 6 of 4, 3 pairs of 8.
    for limit, expected in (
        (BUCKET_BYTES, [[8], [6], [3, 2]]),
        (24, [[3], [3], [2], [6], [3, 2]]),
        (16, [[2], [2], [2], [2], [4], [2], [2, 2], [1, 2]]),
        (1, [[1]] * 14 + [[1, 2]] * 3),
    ):
        monkeypatch.setattr(gradients, "BUCKET_BYTES", limit)
        group, recorder = made(*parameters, group=pair), Recorder()
        group.start(recorder)  # type: ignore[arg-type]
        assert sizes(recorder) == expected
        group.start(recorder)  # type: ignore[arg-type]
        assert len(recorder.summed) == len(expected)  # they are on their way already
        group.wait()
        assert recorder.waited == len(expected)
        group.wait()
        assert recorder.waited == len(expected)
        group.start(recorder)  # type: ignore[arg-type]
        assert len(recorder.summed) == 2 * len(expected)
    alone, recorder = made(*weights(2)), Recorder()
    alone.start(recorder)  # type: ignore[arg-type]
    assert not recorder.summed


def test_which_are_used_goes_with_the_sum() -> None:
    recorder = Recorder()
    a, b = weights(2, 1)
    group = made(a, b, group=Group((0, 1), 7))
    backward(b, 5)
    group.start(recorder)  # type: ignore[arg-type]
    assert [tensor.tolist() for tensor in recorder.summed] == [[0, 0, 5, 0, 1]]
    group.clear()
    backward(a, 1, 2)
    backward(b, 3)
    group.wait()
    group.start(recorder)  # type: ignore[arg-type]
    assert recorder.summed[1].tolist() == [1, 2, 3, 1, 1]


def test_low_precision_is_summed_in_float32() -> None:
    assert [sum_dtype(t) for t in (LOW, torch.float16)] == [torch.float32] * 2
    others = [torch.float32, F, torch.complex64]
    assert [sum_dtype(t) for t in others] == others


@pytest.mark.parametrize("first", [1, 2, 3, 2**16])
def test_low_precision_is_cast_where_it_is(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(flat_gradients, "_FIRST", first)
    a, b, c, d = weights(3, 4, 2, 6, dtype=LOW)
    group = made(a, b, c, d)
    assert group.nbytes == 15 * 4
    for _ in range(3):
        backward(a, 256, 1, 2)
        backward(a, 1, 1, 2)  # 256 + 1 is 256 in bfloat16
        backward(b, *range(4))
        backward(d, *range(10, 16))
    for parameter in (a, b, c, d):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    assert grads(a) == [[771, 6, 12]]
    before = group.norms()
    group.show()
    assert grads(a, b, c, d) == [[772, 6, 12], [0, 3, 6, 9], None, [30, 33, 36, 39, 42, 45]]
    assert a.grad is not None
    assert a.grad.dtype == LOW
    assert b.grad is not None
    assert b.grad.data_ptr() == a.grad.data_ptr() + 3 * 2
    assert len(before) == 1
    group.detach()
    assert [p.grad_dtype for p in (a, b, c, d)] == [LOW] * 4
    assert grads(a, b, c, d) == [None] * 4
    group.clear()
    assert grads(a, b, c, d) == [[0] * 3, [0] * 4, [0] * 2, [0] * 6]
    backward(c, 1, 2)
    group.show()
    assert grads(a, b, c, d) == [None, None, [1, 2], None]


def test_full_precision_is_shown_without_a_copy() -> None:
    (a,) = weights(2)
    group = made(a)
    backward(a, 1, 2)
    assert a.grad is not None
    buffer = a.grad.data_ptr()
    group.show()
    assert a.grad.data_ptr() == buffer
    group.detach()
    group.show()
    assert a.grad is not None
    assert a.grad.data_ptr() == buffer


Hook = Callable[[nn.Parameter], object]


def doubled(parameter: nn.Parameter) -> None:
    """In another tensor."""
    parameter.register_hook(lambda gradient: gradient * 2)


def halved(parameter: nn.Parameter) -> None:
    """In place."""
    parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


def left_out(parameter: nn.Parameter) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


@pytest.mark.parametrize("dtype", [F, LOW])
@pytest.mark.parametrize("copies", [1, 2])
def test_hooks_see_what_is_summed(dtype: torch.dtype, copies: int) -> None:
    many = Copies(copies, 1, 2, 1, 1, 1, dtype=dtype)
    if copies == 1:
        many.groups = [made(*many.weights[0])]
    seen: list[tuple[torch.dtype, list[float]]] = []

    def look(gradient: Tensor) -> None:
        seen.append((gradient.dtype, gradient.tolist()))

    hooks = []
    for mine in many.weights:
        a, b, c, d, e = mine
        for parameter in (a, b, c, e):
            parameter.register_hook(look)
        doubled(a)
        halved(b)
        left_out(c)
        left_out(e)
        hooks.append(Hooks(mine))
        hooks[-1].take()
        backward(a, 1)
        backward(b, 2, 4)
        backward(c, 3)
        backward(d, 5)
    if copies > 1:
        many.sum()
    for group, its in zip(many.groups, hooks, strict=True):
        its.give_back()
        group.call_hooks(its)
    # What is not used is not shown to its hooks.
    assert seen == [(dtype, [copies]), (dtype, [2 * copies, 4 * copies]), (dtype, [3 * copies])] * copies
    norms = [float(norm) ** 2 for group in many.groups for norm in group.norms()]
    assert norms == pytest.approx([copies**2 * (4 + 1 + 4 + 25)] * copies)
    for parameter in many.weights[0]:  # as autograd left them
        assert parameter.grad is not None
        assert parameter.grad.dtype == sum_dtype(dtype)
    expected = [[2 * copies], [copies, 2 * copies], None, [5 * copies], None]
    assert many.shown() == [expected] * copies


def test_a_hook_that_changes_nothing_leaves_the_sum_unrounded() -> None:
    (a,) = weights(1, dtype=LOW)
    group = made(a)
    hooks = Hooks([a])
    a.register_hook(lambda _: None)
    hooks.take()
    backward(a, 256)
    backward(a, 1)
    hooks.give_back()
    group.call_hooks(hooks)
    assert grads(a) == [[257]]
    doubled(a)
    group.call_hooks(hooks)
    assert grads(a) == [[512]]  # which is what it was given, 256, doubled


def test_a_hook_may_not_change_the_dtype() -> None:
    (a,) = weights(1, dtype=LOW)
    group = made(a)
    hooks = Hooks([a])
    a.register_hook(lambda gradient: gradient.float())
    hooks.take()
    backward(a, 1)
    hooks.give_back()
    with pytest.raises(RuntimeError, match="dtype"):
        group.call_hooks(hooks)


def test_what_gradients_are_not_finite() -> None:
    a, b, c, d = [*weights(2, 2, 1), *weights(1, dtype=torch.float32)]
    group = made(a, d, b, c)  # by name: a, b (float32), c, d
    for parameter in (a, b):
        backward(parameter, 1, 2)
    assert group.not_finite() is None
    one_of_two = made(*weights(2, 2))
    backward(one_of_two.parameters["b"], 1, math.nan)
    assert one_of_two.not_finite() == "b"
    backward(c, math.nan)
    assert group.not_finite() == "d"
    backward(d, math.inf)
    assert group.not_finite() == "b"
    backward(b, 0, -math.inf)
    assert group.not_finite() == "b"


def test_scaled_and_dropped() -> None:
    a, b = weights(2, dtype=F)[0], weights(1, dtype=torch.float32)[0]
    group = made(a, b)
    backward(a, 1, 2)
    backward(b, 3)
    group.scale(2.0)
    assert grads(a, b) == [[2, 4], [6]]
    group.scale(torch.tensor(0.5, dtype=F))
    assert grads(a, b) == [[1, 2], [3]]
    group.drop(torch.tensor(False))
    assert grads(a, b) == [[1, 2], [3]]
    backward(a, 0, math.nan)
    group.drop(torch.tensor(True))
    assert grads(a, b) == [[0, 0], [0]]


def test_what_is_scaled_and_dropped_stays_used() -> None:
    copies = Copies(2, 1, 1)
    for mine in copies.weights:
        backward(mine[0], 4)
    copies.sum()
    for group in copies.groups:
        group.scale(0.25)
    assert copies.shown() == [[[2], None]] * 2
    for group in copies.groups:
        group.drop(torch.tensor(True))
    assert copies.shown() == [[[0], None]] * 2
    for group, mine in zip(copies.groups, copies.weights, strict=True):
        group.clear()
        backward(mine[1], 4)
    copies.sum()
    for group in copies.groups:
        group.scale(0.0)
    assert copies.shown() == [[None, [0]]] * 2


def test_what_requires_no_gradient_has_no_buffer() -> None:
    a, b, c = weights(2, 4, 1)
    b.requires_grad_(False)
    group = made(a, b, c, stage=3)
    assert list(group.parameters) == ["a", "b", "c"]
    assert (group.nbytes, b.grad) == (3 * 8, None)
    group.attach()
    b.requires_grad_(True)
    with pytest.raises(ConfigError) as refused:
        group.attach()
    assert str(refused.value) == (
        "b of stage 3 requires a gradient and did not when the pipeline was made; let "
        "pipeline.set_trainable() unfreeze it, on all workers"
    )
    c.requires_grad_(False)
    group.make()
    group.attach()
    assert group.nbytes == 6 * 8
    none = made()
    assert (none.nbytes, none.norms(), none.not_finite()) == (0, [], None)


def squares(*groups: tuple[Sequence[float], bool, int]) -> list[GradientGroup]:
    """Groups with these gradients: counted or not, of a stage."""
    found = []
    for values, counted, stage in groups:
        mine = weights(*([1] * len(values)))
        found.append(made(*mine, counted=counted, stage=stage))
        for parameter, value in zip(mine, values, strict=True):
            backward(parameter, value)
    return found


def test_a_workers_norm_is_of_what_it_counts() -> None:
    groups = squares(([3, 4], True, 0), ([3], False, 1), ([4], True, 1), ([], True, 2))
    assert OwnNorm(groups).read() == (25 + 16, None)
    assert SquaredNorms(groups).read() == [25, 9, 16, 0]
    assert [float(x) for x in squared_norms(groups, CPU)] == [50, 41]
    assert [float(x) for x in squared_norms(groups[:1], CPU)] == [25, 25]
    assert [float(x) for x in squared_norms(groups[1:2], CPU)] == [9, 0]
    nothing = squared_norms(groups[3:], CPU)
    assert [(float(x), x.dtype, x.shape) for x in nothing] == [(0.0, F, ())] * 2
    assert OwnNorm([]).read() == (0, None)
    assert SquaredNorms([]).not_finite() is None
    assert SquaredNorms(iter(groups)).read() == [25, 9, 16, 0]


def test_the_first_stage_that_is_not_finite_is_found() -> None:
    groups = squares(([1], True, 4), ([math.inf], False, 3), ([math.nan], True, 2), ([2], True, 1))
    total, stage = OwnNorm(groups).read()
    assert math.isnan(total)
    assert stage == 2
    fine = squares(([1], True, 4), ([2], True, 1))
    OwnNorm(fine).drop()
    assert OwnNorm(fine).read() == (5, None)
    norm = OwnNorm(groups)
    norm.drop()
    assert norm.read()[1] == 2
    assert OwnNorm(groups).read() == (0, None)
    OwnNorm([]).drop()


def test_norms_of_two_dtypes_and_of_pairs() -> None:
    parts = (*weights(2), *weights(1, dtype=torch.float32), *weights(1, dtype=torch.complex64))
    group = made(*parts)
    backward(parts[0], 1, 2)
    backward(parts[1], 3)
    backward(parts[2], 3 + 4j)
    assert [float(norm) ** 2 for norm in group.norms()] == pytest.approx([5, 9, 25])
    assert [norm.dtype for norm in group.norms()] == [F] * 3


def test_norms_see_what_took_a_gradients_place_and_no_flags() -> None:
    """The numbers that say what was used are no gradients."""
    two = Copies(2, 1, 1)
    for mine in two.weights:
        for parameter in mine:
            parameter.grad = numbers(3)
    assert [float(n) ** 2 for group in two.groups for n in group.norms()] == pytest.approx([18, 18])
    for group in two.groups:
        group.scale(2)
    two.sum()
    assert two.shown() == [[[12], [12]]] * 2


def test_clipping_as_torch_does() -> None:
    assert clip_factor(3.0, None) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(4.0, 4.0) == pytest.approx(1 - 2.5e-7, rel=1e-9)
    (a,) = weights(2)
    a.grad = numbers(3, 4)
    nn.utils.clip_grad_norm_([a], 2.0)
    assert [3 * clip_factor(5.0, 2.0), 4 * clip_factor(5.0, 2.0)] == pytest.approx(a.grad.tolist(), rel=1e-14)


def test_each_parameter_once() -> None:
    a, b = weights(1, 1)
    pairs = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    counter = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    taken = {id(b)}
    named = [("n", counter), ("x", a), ("y", b), ("z", a), ("c", pairs)]
    assert unique(named, taken) == {"x": a, "c": pairs}
    assert taken == {id(a), id(b), id(pairs)}


def test_pairs() -> None:
    assert as_real(numbers(3 + 4j, dtype=torch.complex128)).tolist() == [[3, 4]]
    same = numbers(1, 2)
    assert as_real(same) is same
