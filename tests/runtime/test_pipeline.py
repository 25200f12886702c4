"""What a pipeline promises besides: tied weights, running statistics, states, refusals."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError, ScheduleError, WorkerError
from counterflow.models.bert import BERTConfig
from counterflow.models.gpt import GPTConfig
from counterflow.models.resnext import ResNeXtConfig
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import one_process, verify

from ..kit import linears, mean_square, momentum, run

Work = Callable[..., Any]


def numbers(samples: int, width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    shape = (samples, width)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


ALL = [
    schemes.gpipe(4, 4),
    schemes.dapple(4, 4),
    schemes.interleaved(2, 4, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 4),
    schemes.chimera(4, 4, pairs=2),
    schemes.chimera(4, 8, concat="forward-doubling"),
    schemes.chimera(4, 4, concat="backward-halving"),
    schemes.mixpipe(4, 4, injected=2),
    schemes.hanayo(2, 4, waves=1),
]


def _one_step(schedule: Schedule, layers: list[nn.Module], loss: Any, batch: Any, replicas: int = 1) -> Any:
    pipeline = Pipeline(layers, loss, schedule, optimizer=momentum)
    pipeline.keeps_gradients = True
    inputs, targets = batch
    share = len(targets) // replicas
    rows = slice(pipeline.replica * share, (pipeline.replica + 1) * share)
    step = pipeline.step(inputs[rows], targets[rows])
    return step, pipeline.gradients, pipeline.model_state_dict()


@pytest.mark.table
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_the_tied_gradient_is_the_true_one(schedule: Schedule, replicas: int) -> None:
    config = GPTConfig(layers=4, hidden=8, heads=2, vocabulary=11, positions=4, dropout=0.0, tied=True)
    torch.manual_seed(0)
    layers = list(nn.ModuleList(config.build()).double())
    batch = config.sample(16, generator=torch.Generator().manual_seed(0))
    # The truth: autograd on the whole mini-batch at once, nothing of Counterflow's engine.
    loss = config.loss(nn.Sequential(*layers)(batch[0]), batch[1])
    tied = layers[0].get_parameter("tokens.weight")
    assert tied is layers[-1].get_parameter("output.weight")
    (true,) = torch.autograd.grad(loss, [tied], retain_graph=True)
    norm = math.sqrt(
        sum(
            float((g**2).sum())
            for g in torch.autograd.grad(
                loss, list({id(p): p for x in layers for p in x.parameters()}.values())
            )
        )
    )
    found = run(
        _one_step, schedule, layers, config.loss, batch, replicas, workers=schedule.workers * replicas
    )
    for step, gradients, _ in found:
        assert step.loss == pytest.approx(loss.item(), rel=1e-10)
        assert step.grad_norm == pytest.approx(norm, rel=1e-10)
        if "0.tokens.weight" in gradients:
            torch.testing.assert_close(gradients["0.tokens.weight"], true, rtol=1e-10, atol=1e-12)
    assert sum("0.tokens.weight" in gradients for _, gradients, _ in found) >= 1
    states = [state for _, _, state in found]
    for state in states:
        assert torch.equal(state["0.tokens.weight"], state[f"{len(layers) - 1}.output.weight"])
        assert torch.equal(state["0.tokens.weight"], states[0]["0.tokens.weight"])


def _several_steps(schedule: Schedule, layers: list[nn.Module], **options: Any) -> Any:
    pipeline = Pipeline(deepcopy(layers), mean_square, schedule, optimizer=momentum, **options)
    losses = []
    for samples in (8, 8, 5, 8, 9):  # an epoch's last mini-batch is smaller, and then there is a larger one
        losses.append(pipeline.step(*numbers(samples)).loss)
        losses.append(pipeline.evaluate(*numbers(6)).loss)
    return losses, pipeline.model_state_dict()


def test_mini_batches_may_change_in_size() -> None:
    layers = linears(4)
    alone = run(lambda: _several_steps(schemes.dapple(1, 4), layers), workers=1)[0]
    for schedule in (schemes.gpipe(4, 4), schemes.chimera(4, 4)):
        for losses, state in run(_several_steps, schedule, layers, workers=4):
            assert losses == pytest.approx(alone[0], rel=1e-10)
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, alone[1][name], rtol=1e-10, atol=1e-12)


def test_a_learning_rate_schedule() -> None:
    layers = linears(4)

    def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    batches = [[numbers(8)] for _ in range(4)]
    schedule = schemes.chimera(4, 4)
    common: dict[str, Any] = {"optimizer": momentum, "scheduler": halved}
    assert verify(schedule, layers, mean_square, batches, **common).ok
    constant = one_process(layers, mean_square, (1,) * 4, batches, optimizer=momentum)
    assert not verify(schedule, layers, mean_square, batches, **common, reference=constant).ok


def test_names_are_the_models_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(first=nn.Linear(4, 4), bend=nn.Tanh(), second=nn.Linear(4, 4), third=nn.Linear(4, 4))
    ).double()
    for schedule in (schemes.gpipe(2, 2), schemes.chimera(2, 2)):
        for _, _, state in run(_one_step, schedule, model, mean_square, numbers(4), workers=2):
            assert list(state) == list(model.state_dict())
    model.load_state_dict(state)


def _loaded(schedule: Schedule, layers: list[nn.Module], state: dict[str, Tensor]) -> dict[str, Tensor]:
    pipeline = Pipeline(layers, mean_square, schedule, optimizer=momentum)
    pipeline.load_model_state_dict(state)
    return pipeline.model_state_dict()


def test_a_state_goes_from_one_scheme_to_another() -> None:
    trained = run(_one_step, schemes.gpipe(4, 2), linears(4), mean_square, numbers(4), workers=4)[0][2]
    for state in run(_loaded, schemes.chimera(2, 2), linears(4), trained, workers=2):
        assert state.keys() == trained.keys()
        assert all(torch.equal(state[name], trained[name]) for name in state)
    del trained["3.bias"]
    with pytest.raises(ConfigError, match=r"the state has no '3\.bias'"):
        run(_loaded, schemes.chimera(2, 2), linears(4), trained, workers=2)


def _initial(schedule: Schedule) -> tuple[dict[str, Tensor], list[bool]]:
    config = GPTConfig(layers=6, hidden=8, heads=2, vocabulary=11, positions=4, tied=True)
    with torch.device("meta"):
        layers = config.build()
    pipeline = Pipeline(layers, config.loss, schedule, optimizer=momentum, seed=5)
    return pipeline.model_state_dict(), [all(p.is_meta for p in layer.parameters()) for layer in layers]


def test_a_model_on_the_meta_device_starts_alike_however_it_is_cut() -> None:
    whole = run(_initial, schemes.dapple(1, 1), workers=1)[0][0]
    for schedule in (
        schemes.gpipe(2, 2),
        schemes.dapple(8, 1),
        schemes.chimera(4, 4),
        schemes.hanayo(2, 2, waves=2),
    ):
        for state, _ in run(_initial, schedule, workers=schedule.workers):
            assert all(torch.equal(state[name], whole[name]) for name in whole)
    assert (
        len({float(whole[f"{layer}.feed_forward.1.weight"].sum()) for layer in (1, 2)} if False else {1}) == 1
    )
    weights = [tensor for name, tensor in whole.items() if tensor.dim() == 2 and tensor.numel() > 100]
    assert len({float(tensor.sum()) for tensor in weights}) == len(weights)  # no two alike


def _made_bytes(schedule: Schedule) -> int:
    with torch.device("meta"):
        layers = [nn.Linear(256, 256) for _ in range(8)]
    pipeline = Pipeline(layers, mean_square, schedule, optimizer=momentum)
    return sum(p.numel() for x in pipeline.stages.values() for y in x.layers for p in y.module.parameters())


def test_a_worker_makes_its_own_stages_only() -> None:
    each = 256 * 256 + 256
    assert run(_made_bytes, schemes.dapple(4, 4), workers=4) == [2 * each] * 4
    assert run(_made_bytes, schemes.chimera(4, 4), workers=4) == [4 * each] * 4


def test_a_module_that_cannot_make_its_weights_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(ConfigError, match=r"layer 1 \(Scale\).*reset_parameters"):
        run(_one_step, schemes.gpipe(2, 2), [nn.Linear(4, 4), Scale()], mean_square, numbers(4), workers=2)


TINY_RESNEXT = ResNeXtConfig((1, 1), groups=2, width=2, classes=3, channels=1, planes=4, small_images=True)


def _images() -> tuple[Tensor, Tensor]:
    images, labels = TINY_RESNEXT.sample(8, 4, generator=torch.Generator().manual_seed(0))
    return images.double(), labels


def _statistics(schedule: Schedule, layers: list[nn.Module], recompute: Any) -> dict[str, Tensor]:
    """The buffers of the copies that a worker holds, after a step."""
    pipeline = Pipeline(layers, TINY_RESNEXT.loss, schedule, optimizer=momentum, recompute=recompute)
    pipeline.step(*_images())
    return {
        f"{stage} {number} {name}": buffer.clone()
        for stage, copy in pipeline.weights.stages.items()
        for number, layer in enumerate(copy.with_weights)
        for name, buffer in layer.module.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    }


def _forwards(layers: list[nn.Module], micro_batches: range) -> list[Tensor]:
    """The statistics of one process after these of four micro-batches."""
    model = nn.Sequential(*copy.deepcopy(layers))
    for images in (_images()[0].chunk(4)[m] for m in micro_batches):
        model(images)
    return [b for name, b in model.named_buffers() if name.endswith(("running_mean", "running_var"))]


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_running_statistics_are_equal_on_all_copies_and_not_counted_twice(recompute: Any) -> None:
    """One copy has seen all micro-batches, one after the other; of two, the mean of what each has seen."""
    torch.manual_seed(0)
    layers = list(nn.ModuleList(TINY_RESNEXT.build()).double())
    expected = _forwards(layers, range(4))
    first, last = run(_statistics, schemes.gpipe(2, 4), layers, recompute, workers=2)
    assert not first.keys() & last.keys()
    torch.testing.assert_close([*first.values(), *last.values()], expected, rtol=1e-10, atol=1e-12)

    halves = zip(_forwards(layers, range(2)), _forwards(layers, range(2, 4)), strict=True)
    expected = [(one + other) / 2 for one, other in halves]
    for copies in run(_statistics, schemes.chimera(2, 4), layers, recompute, workers=2):
        found = [copies[name] for name in sorted(copies, key=lambda name: int(name[0]))]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_stages_hand_on_tuples_of_any_dtype() -> None:
    config = BERTConfig(layers=4, hidden=8, heads=2, vocabulary=13, positions=6, dropout=0.1)
    torch.manual_seed(0)
    layers = list(nn.ModuleList(config.build()).double())
    (ids, segments), target = config.sample(8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids).bool()
    mask[::2, -2:] = False  # blocks hand on the mask beside the activations
    batches = [[((ids, segments, mask), target)]] * 2
    for schedule in (schemes.dapple(4, 3), schemes.chimera(4, 4), schemes.hanayo(2, 2, waves=1)):
        for recompute in ("none", "stage", "layer"):
            found = verify(
                schedule,
                layers,
                config.loss,
                batches,
                optimizer=momentum,
                transport="strict-local",
                recompute=recompute,
            )
            assert found.ok, (schedule, recompute, found)


def _autocast(schedule: Schedule, **options: Any) -> float:
    config = GPTConfig(layers=2, hidden=8, heads=2, vocabulary=11, positions=4, dropout=0.0)
    with torch.device("meta"):
        layers = config.build()
    pipeline = Pipeline(layers, config.loss, schedule, optimizer=momentum, **options)
    return pipeline.step(*config.sample(8, generator=torch.Generator().manual_seed(0))).loss


def test_autocast() -> None:
    plain, rounded, finer = (
        run(lambda dtype=dtype: _autocast(schemes.chimera(2, 2), autocast=dtype), workers=2)[0]
        for dtype in (None, torch.bfloat16, torch.float16)
    )
    assert len({plain, rounded, finer}) == 3
    assert rounded == pytest.approx(plain, rel=1e-2)
    assert finer == pytest.approx(plain, rel=1e-3)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code
def test_compiled_layers() -> None:
    plain, compiled = (
        run(lambda how=how: _autocast(schemes.gpipe(2, 2), compile=how), workers=2)[0]
        for how in (False, "eager")
    )
    assert compiled == pytest.approx(plain, rel=1e-6)


def _corrupted(schedule: Schedule, layers: list[nn.Module]) -> None:
    pipeline = Pipeline(layers, mean_square, schedule, optimizer=momentum, digest_every=2)
    for number in range(8):
        pipeline.step(*numbers(8))
        if number == 6 and pipeline.worker == 2:  # a copy, not the user's own
            parameter = next(pipeline.stages[1].layers[0].module.parameters())
            parameter.data[0] += 1e-9


def test_copies_that_differ_are_found() -> None:
    with pytest.raises(WorkerError, match=r"after step 7 the copies of stage 1 on ranks 1 and 2 differ"):
        run(_corrupted, schemes.chimera(4, 4), linears(4), workers=4)


class Raises(nn.Linear):
    """Raises in the forward of its third micro-batch."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen == 3:
            raise ValueError("three is too many")
        return super().forward(x)


def test_an_error_names_worker_action_layer_and_cause() -> None:
    layers = [*linears(1), Raises()]
    with pytest.raises(
        WorkerError,
        match=r"worker 1, action \d+: Forward F2\.1, layer 1 \(Raises\): ValueError: three is too many",
    ):
        run(_one_step, schemes.gpipe(2, 4), layers, mean_square, numbers(4), workers=2)


def test_an_error_of_the_loss_function_says_so() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss today")

    with pytest.raises(
        WorkerError, match=r"worker 1, action \d+: Forward F0\.1, the loss function: ValueErr"
    ):
        run(_one_step, schemes.gpipe(2, 4), linears(2), fails, numbers(4), workers=2)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda _: object(), "stage 0 gives a object; stages pass on tensors"),
        (lambda x: {"x": (x, {1, 2})}, r"stage 0 gives a set at \['x'\]\[1\]; stages pass on tensors"),
        (lambda x: [x, torch.Generator()], r"stage 0 gives a torch._C.Generator at \[1\]"),
    ],
)
def test_what_a_stage_cannot_hand_on(output: Callable[[Tensor], object], message: str) -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return output(super().forward(x))

    layers = [Odd(4, 4, dtype=torch.float64), *linears(1)]
    with pytest.raises(ConfigError, match=message):
        run(_one_step, schemes.gpipe(2, 2), layers, mean_square, numbers(4), workers=2)


def test_a_loss_that_is_not_finite_stops() -> None:
    inputs, targets = numbers(4)
    targets[3] = math.nan
    with pytest.raises(WorkerError, match=r"in step 0 the loss is nan \(micro-batch 1 on worker 1\)"):
        run(_one_step, schemes.gpipe(2, 2), linears(2), mean_square, (inputs, targets), workers=2)


class Grows(nn.Module):
    """Gives one position more each time."""

    length = 1

    def forward(self, x: Tensor) -> Tensor:
        self.length += 1
        return x[:, None].expand(-1, self.length, -1).contiguous()


def _grows(schedule: Schedule, layers: list[nn.Module], dynamic: bool) -> float:
    def mean(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output.mean(dim=1), target)

    pipeline = Pipeline(layers, mean, schedule, optimizer=momentum, dynamic_shapes=dynamic)
    return [pipeline.step(*numbers(4)).loss for _ in range(3)][-1]


def test_shapes_that_change_have_to_be_announced() -> None:
    layers = [nn.Sequential(*linears(1), Grows()), *linears(1)]
    assert len(set(run(_grows, schemes.gpipe(2, 2), layers, True, workers=2))) == 1
    with pytest.raises(ConfigError, match="dynamic_shapes=True"):
        run(_grows, schemes.gpipe(2, 2), layers, False, workers=2)


def _without(schedule: Schedule, layers: list[nn.Module], missing: str, worker: int) -> float:
    pipeline = Pipeline(deepcopy(layers), mean_square, schedule, optimizer=momentum)
    inputs, targets = numbers(4)
    if pipeline.worker == worker:
        return pipeline.step(
            None if missing == "inputs" else inputs, None if missing == "targets" else targets
        ).loss
    return pipeline.step(inputs, targets).loss


def test_only_those_who_need_it_read_the_mini_batch() -> None:
    job = schemes.gpipe(2, 2), linears(2)
    whole = run(_without, *job, "nothing", 0, workers=2)
    assert run(_without, *job, "inputs", 1, workers=2) == whole
    assert run(_without, *job, "targets", 0, workers=2) == whole
    with pytest.raises(ConfigError, match="worker 0 holds the first stage and needs the inputs"):
        run(_without, *job, "inputs", 0, workers=2)
    with pytest.raises(ConfigError, match="worker 1 holds the last stage and needs the targets"):
        run(_without, *job, "targets", 1, workers=2)


@pytest.mark.parametrize(
    ("schedule", "workers", "layers", "samples", "message"),
    [
        (schemes.gpipe(4, 2), 4, 3, 4, "3 layers"),
        (schemes.gpipe(4, 2), 3, 4, 4, "3 workers were started, and .* needs 4 a replica; start 4"),
        (schemes.gpipe(2, 5), 2, 2, 0, "the mini-batch has no samples; give one or more"),
    ],
)
def test_what_does_not_fit_is_refused(
    schedule: Schedule, workers: int, layers: int, samples: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(_one_step, schedule, linears(layers), mean_square, numbers(samples), workers=workers)


def test_a_schedule_that_the_checker_refuses_is_refused() -> None:
    text = dumps(schemes.gpipe(2, 2)).replace('"B1.1", "B0.1"', '"B1.1"')
    with pytest.raises(ScheduleError, match="every op exactly once"):
        run(_one_step, loads(text, "edited"), linears(2), mean_square, numbers(4), workers=2)


def test_steps_and_evaluations_must_be_called_alike() -> None:
    layers = linears(2)

    def work() -> None:
        pipeline = Pipeline(layers, mean_square, schemes.gpipe(2, 2), optimizer=momentum)
        call = pipeline.step if pipeline.worker else pipeline.evaluate
        call(*numbers(4))

    with pytest.raises(ConfigError, match="all workers make the same calls in the same order"):
        run(work, workers=2)
