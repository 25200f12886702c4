"""The pretended device: what a GPU does that a CPU does not, each rule by itself; and the engine on it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.functional import mse_loss

import counterflow as cf
from counterflow.common.tensors.devices import HostCopy
from counterflow.runtime.transport.base import Status
from counterflow.runtime.transport.progress import Progress
from counterflow.runtime.transport.worker_watch import Watch
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.testing.strict_nccl.device import Device
from counterflow.testing.strict_nccl.device_memory import CopyError
from counterflow.testing.strict_nccl.operator_modes import computing

from ..kit import sgd

_T = TypeVar("_T")


def on_device(function: Callable[[Device], _T]) -> _T:
    device = Device(0, lambda _launches, _why: None)
    with computing(device.stream, device):
        return function(device)


# -- where tensors are


def test_a_tensor_says_where_it_is_and_passes_it_on() -> None:
    def program(device: Device) -> None:
        host = torch.ones(3)
        there = host.to(device.handle)
        assert host.device.type == "cpu"
        assert host.is_cpu
        assert there.device == device.handle
        assert not there.is_cpu
        for made in (
            there * 2,
            there[1:],
            there.detach(),
            torch.zeros_like(there),
            there.new_zeros(2),
            torch.zeros(2, device=there.device),
            torch.tensor([1.0], device=device.handle),
            copy.deepcopy(there),
            nn.Parameter(there),
            there.to(torch.float64),
        ):
            assert made.device == device.handle
        for made in (torch.zeros(2), there.cpu(), there.to("cpu"), torch.zeros_like(there, device="cpu")):
            assert made.device.type == "cpu"
        layer = nn.Linear(3, 2).to(device.handle)
        out = layer(there)
        out.sum().backward()
        assert out.device == device.handle
        assert layer.weight.grad is not None
        assert layer.weight.grad.device == device.handle

    on_device(program)


def test_host_and_device_do_not_mix_but_for_numbers_and_indices() -> None:
    def program(device: Device) -> None:
        there, host = torch.ones(3, device=device.handle), torch.ones(3)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            there + host
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            nn.Linear(3, 3)(there)
        assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]
        assert there[torch.tensor([0, 1])].tolist() == [1, 1]

    on_device(program)


def test_workers_have_a_device_each() -> None:
    other = Device(1, lambda _launches, _why: None)
    with computing(other.stream, other):
        theirs = torch.ones(3, device=other.handle)

    def program(device: Device) -> None:
        with pytest.raises(RuntimeError, match="pretended:0 and pretended:1"):
            torch.ones(3, device=device.handle) + theirs
        with pytest.raises(RuntimeError, match="makes a tensor on pretended:1"):
            torch.ones(3, device=other.handle)

    on_device(program)


def test_reads_of_device_memory_wait_or_are_refused() -> None:
    def program(device: Device) -> None:
        there = torch.arange(3.0, device=device.handle)
        assert there.tolist() == [0, 1, 2]
        assert there[1].item() == 1
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()

    on_device(program)


# -- copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("wait", ["event", "query", "stream", "device", "item", "copy"])
def test_a_copy_to_the_host_is_nothing_before_it_is_waited_for(dtype: torch.dtype, wait: str) -> None:
    def program(device: Device) -> None:
        there = torch.tensor([0, 1], device=device.handle).to(dtype)
        found = there.to("cpu", non_blocking=True)
        pinned = torch.empty(2, dtype=dtype, pin_memory=True)
        pinned.copy_(there, non_blocking=True)
        assert found.tolist() != [0, 1]
        assert pinned.tolist() != [0, 1]
        module = torch.get_device_module(device.handle)
        event = module.Event()
        event.record()
        if wait == "event":
            event.synchronize()
        elif wait == "query":
            while not event.query():
                assert found.tolist() != [0, 1]
        elif wait == "stream":
            module.current_stream().synchronize()
        elif wait == "device":
            module.synchronize()
        elif wait == "item":
            there[0].item()
        else:
            there.cpu()
        assert found.tolist() == [0, 1]
        assert pinned.tolist() == [0, 1]

    on_device(program)


def test_a_copy_out_of_pinned_memory_reads_it_when_the_device_comes_to_it() -> None:
    def program(device: Device) -> None:
        pinned = torch.ones(3).pin_memory()
        assert pinned.is_pinned()
        pinned.to(device.handle, non_blocking=True)
        torch.get_device_module(device.handle).synchronize()
        pinned.fill_(2)  # the device has it
        target = torch.empty(3, device=device.handle)
        target.copy_(pinned, non_blocking=True)
        pinned.fill_(3)
        with pytest.raises(CopyError, match="was changed before the device had copied it"):
            torch.get_device_module(device.handle).synchronize()
        pageable = torch.ones(3)
        pageable.to(device.handle, non_blocking=True)
        pageable.fill_(2)  # torch copies pageable memory before it returns
        torch.get_device_module(device.handle).synchronize()

    on_device(program)


def test_numbers_that_are_read_later_wait_for_their_copy() -> None:
    assert on_device(lambda device: HostCopy(torch.arange(3.0, device=device.handle)).read()) == [0, 1, 2]


# -- optimisers


def test_a_fused_optimizer_takes_its_steps_from_the_device() -> None:
    def program(device: Device) -> None:
        parameter = nn.Parameter(torch.ones(3, device=device.handle))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        parameter.grad = torch.ones(3, device=device.handle)
        optimizer.step()
        state = optimizer.state[parameter]
        assert state["step"].device == device.handle
        state["step"] = state["step"].cpu()
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="assigned grad has data located on a different device"):
            parameter.grad = torch.ones(3)

    on_device(program)


# -- errors of the device


def test_an_error_of_the_device_comes_up_in_whatever_is_called_next() -> None:
    def program(device: Device) -> None:
        there = torch.ones(3, device=device.handle)
        event = torch.get_device_module(device.handle).Event()
        event.record()
        device.fails = lambda doing: doing == "computing"
        there + 1  # the host goes on
        for call in (
            lambda: there + 1,
            event.query,
            event.synchronize,
            event.record,
            there.tolist,
            there.cpu,
        ):
            with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                call()
        assert torch.ones(3).tolist() == [1, 1, 1]

    on_device(program)


def test_the_watch_tells_of_it_as_one() -> None:
    device = Device(0, lambda _launches, _why: None)
    progress = Progress(Status(0), device.stream.record_event)
    progress.computed()
    device.error = torch.AcceleratorError("an illegal memory access was encountered")
    told = threading.Event()
    watch = Watch(
        HashStore(),
        Status(0),
        2,
        timeout_seconds=20.0,
        break_waits=told.set,
        device_status=progress.status,
        end=lambda _why: None,
    )
    try:
        assert told.wait(20)
        assert "device of rank 0: AcceleratorError: an illegal memory access" in str(watch.device_error)
    finally:
        watch.stop()


# -- process groups


def test_groups_of_the_device_refuse_the_host_and_those_of_the_host_the_device() -> None:
    def work() -> None:
        transport: Any = current_transport()
        everybody = transport.group(range(transport.world_size))
        host, there = torch.ones(3), torch.ones(3, device=transport.device)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            transport.all_reduce(host, everybody)
        with pytest.raises(RuntimeError, match="No backend type associated with device type pretended"):
            transport.control.send_described([there], 1 - transport.rank, 0)
        with pytest.raises(RuntimeError, match="No backend type associated with device type pretended"):
            transport.gather_objects({"weights": [there]})
        transport.all_reduce(there, everybody).wait()
        assert there.tolist() == [2, 2, 2]
        assert transport.gather_objects(host.tolist()) == [[1, 1, 1]] * 2

    cf.launch(work, workers=2, transport="strict-nccl", timeout_seconds=20)


# -- the engine on it


def linears(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


def batch(samples: int = 8, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=draws), torch.randn(samples, 4, generator=draws)


@pytest.mark.parametrize("schedule", [schemes.dapple(2, 4), schemes.chimera(2, 4)], ids=str)
def test_predict_and_outputs_are_what_the_device_computed(schedule: Schedule) -> None:
    layers = linears(2)
    inputs, targets = batch()

    def work() -> Any:
        pipeline = cf.Pipeline(copy.deepcopy(layers), mse_loss, schedule, optimizer=sgd)
        found = pipeline.predict(inputs).tolist()
        evaluated = pipeline.evaluate(inputs, targets, outputs=True).outputs
        outputs = None if evaluated is None else evaluated.tolist()
        step = pipeline.step(inputs, targets, outputs=True)
        return found, outputs, None if step.outputs is None else step.outputs.tolist()

    expected = nn.Sequential(*layers)(inputs)
    for told in cf.launch(work, workers=2, transport="strict-nccl"):
        for found in told:
            if found is not None:
                torch.testing.assert_close(torch.tensor(found), expected)


@pytest.mark.parametrize(
    "schedule", [schemes.pipedream(2, 2), schemes.pipedream_2bw(2, 2), schemes.dapple(2, 2)], ids=str
)
@pytest.mark.parametrize("barrier", [True, False])
def test_pinned_inputs_may_be_filled_anew_after_a_step(schedule: Schedule, barrier: bool) -> None:
    if not schedule.synchronous and not barrier:
        return
    layers = linears(2)

    def work(*, pinned: bool) -> Any:
        pipeline = cf.Pipeline(copy.deepcopy(layers), mse_loss, schedule, optimizer=sgd, barrier=barrier)
        inputs, targets = torch.empty(8, 4), torch.empty(8, 4)
        if pinned:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        for number in range(6):
            for held, new in zip((inputs, targets), batch(seed=number), strict=True):
                held.copy_(new)
            pipeline.step(inputs, targets)
        return pipeline.model_state_dict()

    alone, found = (
        cf.launch(work, workers=2, transport="strict-nccl", pinned=pinned)[0] for pinned in (False, True)
    )
    assert all(found[name].equal(alone[name]) for name in alone)


class Lengths(nn.Linear):
    """Hands on a number and lengths that are on the host, as ``pack_padded_sequence`` wants them."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 0.5, torch.full((len(x),), 3)


class Takes(nn.Linear):
    def forward(self, given: Any) -> Any:
        x, factor, lengths = given
        assert lengths.device.type == "cpu"
        assert lengths.tolist() == [3] * len(x)
        return super().forward(x) * factor


def test_numbers_and_host_tensors_between_stages() -> None:
    inputs, targets = batch()

    def work() -> Any:
        torch.manual_seed(0)
        layers = [Lengths(4, 4), Takes(4, 4)]
        pipeline = cf.Pipeline(layers, mse_loss, schemes.dapple(2, 4), optimizer=sgd)
        return [pipeline.step(inputs, targets).loss for _ in range(4)]

    found = cf.launch(work, workers=2, transport="strict-nccl")
    assert found == cf.launch(work, workers=2, transport="local")


@pytest.mark.parametrize("place", ["F0", "B1", "update", "send", "receive"])
def test_a_device_that_fails_ends_the_run_with_its_error(place: str) -> None:
    inputs, targets = batch()

    def work() -> Any:
        pipeline = cf.Pipeline(linears(2), mse_loss, schemes.dapple(2, 4), optimizer=sgd)
        pipeline.step(inputs, targets)
        device: Any = pipeline.transport
        if pipeline.worker == 1:
            device.control.pretended.fails = lambda doing: place in str(doing).lower() or place in str(doing)
        for _ in range(3):
            pipeline.step(inputs, targets)

    with pytest.raises(cf.WorkerError, match="illegal memory access"):
        cf.launch(work, workers=2, transport="strict-nccl", timeout_seconds=20)


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("how", [{"fused": True}, {"capturable": True}, {}])
def test_a_training_goes_on_with_an_optimizer_whose_steps_are_on_the_device(
    how: dict[str, Any], zero_stage: int
) -> None:
    inputs, targets = batch()

    def made() -> cf.Pipeline:
        return cf.Pipeline(
            linears(2),
            mse_loss,
            schemes.chimera(2, 2),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **how),
            zero_stage=zero_stage,
        )

    def work() -> Any:
        first = made()
        first.step(inputs, targets)
        second = made()
        second.load_state_dict(first.state_dict())
        return [[one.step(inputs, targets).loss for _ in range(2)] for one in (first, second)]

    for alone, resumed in cf.launch(work, workers=2, transport="strict-nccl"):
        assert resumed == alone


def test_a_thread_without_a_device_can_be_profiled() -> None:
    on_device(lambda device: torch.ones(1, device=device.handle))  # it is registered
    with torch.profiler.profile() as found:
        torch.ones(3)
    assert found.events() is not None


# -- graphs


def captured(device: Device, run: Callable[[], _T], pool: Any = None) -> tuple[Any, _T]:
    module: Any = torch.get_device_module(device.handle)
    graph = module.CUDAGraph()
    with module.graph(graph, pool=pool):
        result = run()
    return graph, result


def test_a_replay_computes_from_and_to_fixed_addresses() -> None:
    def program(device: Device) -> None:
        x = torch.ones(3, device=device.handle)
        total = torch.zeros(3, device=device.handle)
        calls = []

        def run() -> Tensor:
            calls.append(1)
            total.add_(x)
            return (x * 2).exp()

        graph, result = captured(device, run)
        assert total.tolist() == [0, 0, 0]  # a capture computes nothing
        assert result.isnan().all()
        for number in range(1, 4):
            x.fill_(number)
            graph.replay()
            torch.testing.assert_close(result, torch.full_like(x, 2 * number).exp())
        assert total.tolist() == [6, 6, 6]
        assert calls == [1]

    on_device(program)


def test_a_replay_has_the_gradients_of_new_values() -> None:
    def program(device: Device) -> None:
        layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device.handle)
        x, above = torch.ones(2, 3, device=device.handle), torch.ones(2, 2, device=device.handle)
        pool: Any = torch.get_device_module(device.handle)
        pool = pool.graph_pool_handle()
        forward, output = captured(device, lambda: layer(x), pool)
        forward.replay()
        weights = [*layer.parameters()]
        backward, gradients = captured(
            device, lambda: torch.autograd.grad(output, weights, above, retain_graph=True), pool
        )
        for number in range(3):
            x.copy_(torch.full_like(x, number / 2))
            forward.replay()
            backward.replay()
            expected = torch.autograd.grad(layer(x), weights, above)
            torch.testing.assert_close(gradients, expected)

    on_device(program)


def test_a_replay_overwrites_memory_of_its_pool_that_was_free() -> None:
    def program(device: Device) -> None:
        x = torch.ones(3, device=device.handle)
        pool: Any = torch.get_device_module(device.handle)
        pool = pool.graph_pool_handle()
        first, x1 = captured(device, lambda: x + 1, pool)
        second, x2 = captured(device, lambda: x + 2, pool)
        separate, x3 = captured(device, lambda: x + 3)
        for graph in (separate, first, second):
            graph.replay()
        assert [x1.tolist(), x2.tolist(), x3.tolist()] == [[2] * 3, [3] * 3, [4] * 3]
        first.replay()  # the second one's memory may be what the first one had freed
        assert x2.isnan().all()
        assert x3.tolist() == [4, 4, 4]

    on_device(program)


def test_a_replay_reads_anything_from_memory_that_was_freed() -> None:
    def program(device: Device) -> None:
        weight = nn.Parameter(torch.ones(3, device=device.handle))
        graph, result = captured(device, lambda: weight.detach() * 2)
        graph.replay()
        assert result.tolist() == [2, 2, 2]
        weight.data = torch.ones(3, device=device.handle)
        graph.replay()
        assert result.isnan().all()

    on_device(program)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.ones(3).to(x.device),
        lambda x: torch.get_device_module(x.device).synchronize(),
        lambda x: torch.get_device_module(x.device).Event().query(),
        lambda x: (torch.manual_seed(1), x.bernoulli(0.5)),
    ],
)
def test_a_capture_refuses_what_waits_for_the_device(run: Callable[[Tensor], object]) -> None:
    def program(device: Device) -> None:
        x = torch.ones(3, device=device.handle)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with pytest.raises(RuntimeError, match=r"stream (is capturing|capture)"):
                captured(device, lambda: run(x))
        assert (x + 1).tolist() == [2, 2, 2]  # the device goes on

    on_device(program)
