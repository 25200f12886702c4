"""A cluster of several nodes on this machine: what is found of its links, and steps predicted with that.

    python benchmarks/cluster.py [--layout 2x2 ...] [--megabits 1000 100] [--delays 0.1 5] [--quick] [--keep]

Needs root, and Linux. Each node is a network namespace whose only way out is a tun device; a relay in user
space takes packets from one and gives them to another, at a rate and after a delay (netem is not in every
kernel). The relay's own rate and delay are measured first, with a socket. Inside a node messages go by
loopback. torchrun starts the workers of each node in its namespace. All namespaces and processes are taken
down whatever happens.

Stages sleep, so that many workers run on two cores. Links are measured by the functions that
`counterflow profile` uses; with these and the sleeps every configuration is predicted, and measured as the
median of some steps.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from machine import load, machine, shown

RESULTS = Path(__file__).parent / "results"
MTU = 64_000
FORWARD_SECONDS = 0.010
WEIGHTS, WIDTH, SAMPLES = 250_000, 16_384, 2  # floats of a layer; of its output, for one sample
SCHEMES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "dapple": {},
    "chimera": {"stages": True},
    "hanayo": {"waves": 1},
    "interleaved": {"chunks": 2},
}


def name_of(node: int) -> str:
    """The namespace of a node; of this process alone."""
    return f"cfb{os.getpid() % 10_000}n{node}"


def run(*words: str) -> None:
    """A command that has to work."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def nodes(count: int, megabits: float, delay_seconds: float) -> Iterator[list[str]]:
    """Namespaces with a way to each other, and the relay between them."""
    names = [name_of(node) for node in range(count)]
    relay = None
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        words = [sys.executable, __file__, "--relay", *names]
        words += ["--rate", str(megabits), "--delay", str(delay_seconds)]
        relay = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise SystemExit("the relay did not start; is this root?")
        for node, name in enumerate(names):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "cf0")
            run("ip", "-n", name, "link", "set", "cf0", "mtu", str(MTU), "up")
        yield names
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for name in names:
            # torchrun's workers are of sessions of their own.
            left = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for process in map(int, left.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def relay(names: list[str], megabits: float, delay_seconds: float) -> None:
    """Packets from one namespace to another: out of each one at a time, at the rate, and after the delay."""
    devices = [_tun(name) for name in names]
    by_device = {device: node for node, device in enumerate(devices)}
    print("ready", flush=True)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    seconds_per_byte = 8 / (megabits * 1e6)
    free = [0.0] * len(names)
    due: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.perf_counter()
        while due and due[0][0] <= now:
            _, _, node, packet = heapq.heappop(due)
            with contextlib.suppress(OSError):
                os.write(devices[node], packet)
        wait = max(0.0, due[0][0] - time.perf_counter()) if due else 1.0
        # Who has more than its share under way is not read from: its packets wait where they are.
        ready = [device for device in devices if free[by_device[device]] < now + 0.02]
        readable, _, _ = select.select(ready, [], [], min(wait, 0.001 if len(ready) < len(devices) else wait))
        for device in readable:
            packet = os.read(device, MTU + 100)
            sender, taker = by_device[device], packet[19] - 1
            if packet[0] >> 4 != 4 or not 0 <= taker < len(devices):
                continue
            free[sender] = max(free[sender], time.perf_counter()) + len(packet) * seconds_per_byte
            count += 1
            heapq.heappush(due, (free[sender] + delay_seconds, count, taker, packet))


def _tun(namespace: str) -> int:
    """A tun device in a namespace, which this process reads and writes."""
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as here, Path(f"/run/netns/{namespace}").open() as there:
        if libc.setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(
                device, 0x400454CA, struct.pack("16sH22x", b"cf0", 0x1001)
            )  # TUNSETIFF: tun, no header
        finally:
            libc.setns(here.fileno(), 0)
    return device


def inside(name: str, *words: str, **more: Any) -> subprocess.Popen[str]:
    """A command in a namespace; its processes are a group of their own."""
    return subprocess.Popen(["ip", "netns", "exec", name, *words], text=True, start_new_session=True, **more)


def all_done(started: list[subprocess.Popen[str]], seconds: float) -> None:
    """Until all have ended well; what is left is ended."""
    try:
        until = time.monotonic() + seconds
        for process in started:
            if process.wait(max(1.0, until - time.monotonic())):
                raise SystemExit(f"{process.args!r} ended with {process.returncode}")
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# What a socket finds


def probe(names: list[str]) -> tuple[float, float]:
    """Seconds of a byte one way, and bytes a second, by a socket between the first two nodes."""
    server = inside(names[0], sys.executable, __file__, "--serve")
    with tempfile.NamedTemporaryFile("r") as file:
        all_done([inside(names[1], sys.executable, __file__, "--ask", file.name), server], 60)
        return tuple(json.load(file))


def serve() -> None:
    """Answer bytes one by one, then one answer for many."""
    with socket.create_server(("10.77.0.1", 7001)) as listening:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            connection.sendall(connection.recv(1))
        left = 4 << 20
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(b"x")


def ask(out: str) -> None:
    """Time that, as who asks."""
    until = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("10.77.0.1", 7001), 5)
            break
        if time.monotonic() > until:
            raise SystemExit("no answer through the relay")
        time.sleep(0.1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    there_and_back = []
    for _ in range(20):
        begin = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        there_and_back.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    connection.sendall(bytes(4 << 20))
    connection.recv(1)
    seconds = time.perf_counter() - begin - min(there_and_back)
    Path(out).write_text(json.dumps([statistics.median(there_and_back) / 2, (4 << 20) / seconds]))


# What workers do


def work(out: str, quick: bool) -> None:
    """Measure links, then predict and measure every configuration; the first worker writes."""
    import torch  # noqa: PLC0415
    from emulated_device import precise_sleep, undisturbed  # noqa: PLC0415

    import counterflow as cf  # noqa: PLC0415
    from counterflow.plan import (  # noqa: PLC0415  # noqa: PLC0415
        AllReduce,
        Arrangement,
        Cluster,
        Configuration,
        LayerProfile,
        Link,
        Model,
        Predictor,
        Profile,
    )
    from counterflow.plan.device_placement import devices  # noqa: PLC0415
    from counterflow.runtime.workers.world import current_transport, place  # noqa: PLC0415
    from counterflow.schedule import registry  # noqa: PLC0415
    from counterflow.schedule.modes import Sync  # noqa: PLC0415
    from counterflow.train.profiling import _links, _pairs, fitted  # noqa: PLC0415

    class Sleep(torch.autograd.Function):
        """Takes a forward's time, and twice of it backward."""

        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.size = weight.shape
            time.sleep(FORWARD_SECONDS)
            return value + 0.0

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(2 * FORWARD_SECONDS)
            return gradients[0], torch.zeros(ctx.size)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(WEIGHTS))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Sleep.apply(value, self.weight)  # type: ignore[no-untyped-call]
            return found

    torch.set_num_threads(1)
    undisturbed()
    precise_sleep()
    transport = current_transport("gloo")
    here = place()
    assert here is not None
    each = here.world_size // here.machines
    links = [_links(3, pair) for pair in _pairs(each, here.machines)]
    near, far = links[0], links[-1]
    cluster = Cluster(
        "emulated", here.machines, each, 1e12,
        inside=fitted(near[0]) if each > 1 else Link(0.0, 0.0),
        between=fitted(far[0]),
        allreduce_inside=fitted(near[1], begins=2) if each > 1 else None,
        allreduce_between=fitted(far[1], begins=2),
        allreduce=AllReduce.RING, shared_adapter=each > 1,
    )  # fmt: skip
    bytes_of_layer, bytes_of_sample = 4.0 * WEIGHTS, 4.0 * WIDTH
    beside = _overhead(Layer)
    forward, backward = FORWARD_SECONDS + beside, 2 * FORWARD_SECONDS + beside
    layer = LayerProfile(
        (1.0, 64.0), (forward,) * 2, (backward,) * 2, (0.0, 0.0), bytes_of_layer, bytes_of_sample
    )
    model = Model("sleeping", ("layer",) * 8, 0.0, config={"pipeline": {"clip_norm": 0}})
    profile = Profile("p", "a sleep", "", {"layer": layer})
    predictor = Predictor(model, profile, cluster)
    rows = []
    size = here.world_size
    depths = (2, 4) if size > 2 else (2,)
    choices = list(product(SCHEMES, depths, ("end", "eager"), ("pipeline-inside", "replicas-inside")))
    for scheme, depth, sync, side in choices[:: 5 if quick else 1]:
        if depth > size or (size == depth and (sync, side) != ("end", "pipeline-inside")):
            continue
        known = registry.scheme(scheme)
        more = {k: v for k, v in SCHEMES[scheme].items() if v is not True}
        options = {known.depth: depth, "micro_batches": 2 * depth, **more}
        replicas, arrangement = size // depth, Arrangement(side)
        schedule = registry.build(scheme, options)
        said = Configuration.of(scheme, options, replicas, SAMPLES, sync=Sync(sync), arrangement=arrangement)
        predicted = predictor.predict(said)
        pipeline = cf.Pipeline(
            [Layer() for _ in range(8)], lambda output, _: output.mean(), schedule, sync=sync,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), digest_every=0,
            cuts=tuple(map(int, predicted.configuration.cuts)),
            mesh=devices(schedule.placement, replicas, arrangement),
        )  # fmt: skip
        inputs = torch.zeros(SAMPLES * 2 * depth, WIDTH)
        taken = []
        for _ in range(4 if quick else 6):
            transport.gather([0.0])
            begin = time.perf_counter()
            pipeline.step(inputs, torch.zeros(len(inputs)))
            taken.append(max(row[0] for row in transport.gather([time.perf_counter() - begin])))
        pipeline.close()
        name = f"{scheme} D={depth} W={replicas} {sync} {side}"
        rows.append((name, predicted.step_seconds, statistics.median(taken[1:])))
    found = {"inside": each > 1 and _link(cluster.inside), "between": _link(cluster.between), "rows": rows}
    if transport.rank == 0:
        Path(out).write_text(json.dumps(found))


def _link(link: Any) -> tuple[float, float]:
    return link.latency_seconds, 1 / link.seconds_per_byte if link.seconds_per_byte else 0.0


def _overhead(layer: Any) -> float:
    """What a forward or backward of a sleeping layer takes beside its sleep, alone on this worker."""
    import torch  # noqa: PLC0415

    module, taken = layer(), []
    for _ in range(8):
        value = torch.zeros(SAMPLES, WIDTH)
        begin = time.perf_counter()
        module(value).mean().backward()
        taken.append((time.perf_counter() - begin - 3 * FORWARD_SECONDS) / 2)
    return max(0.0, statistics.median(taken))


# The benchmark


def one(layout: str, megabits: float, delay: float, *, quick: bool) -> dict[str, Any]:
    """A cluster of one kind: what its relay does, what is found of its links, and steps."""
    count, each = map(int, layout.split("x"))
    with nodes(count, megabits, delay / 1000) as names, tempfile.NamedTemporaryFile("r") as file:
        reached = probe(names)
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cf0", "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count)]
        torchrun += ["--nproc-per-node", str(each), "--master-addr", "10.77.0.1", "--master-port", "29501"]
        program = [__file__, "--work", file.name, *(["--quick"] if quick else [])]
        started = [
            inside(name, *torchrun, "--node-rank", str(node), *program, env=environment)
            for node, name in enumerate(names)
        ]
        all_done(started, 540)
        found: dict[str, Any] = json.load(file)
    return found | {"layout": layout, "megabits": megabits, "delay_ms": delay, "socket": reached}


def report(data: dict[str, Any]) -> list[str]:
    """What is printed."""
    lines = [shown(data["machine"]), ""]
    lines.append("| nodes x workers | Mbit/s, ms set | by a socket | found between nodes | found inside |")
    lines.append("|---|---|---|---|---|")
    for each in data["clusters"]:
        near = _said(each["inside"]) if each["inside"] else ""
        lines.append(
            f"| {each['layout']} | {each['megabits']:g}, {each['delay_ms']:g} | {_said(each['socket'])} | "
            f"{_said(each['between'])} | {near} |"
        )
    lines += [
        "",
        "| cluster | configuration | predicted ms | measured ms | predicted / measured |",
        "|---|---|--:|--:|--:|",
    ]
    ratios = []
    for each in data["clusters"]:
        for name, predicted, measured in each["rows"]:
            ratios.append(predicted / measured)
            lines.append(
                f"| {each['layout']}, {each['megabits']:g} Mbit/s, {each['delay_ms']:g} ms | {name} | "
                f"{1000 * predicted:.1f} | {1000 * measured:.1f} | {ratios[-1]:.3f} |"
            )
    off = sorted(abs(ratio - 1) for ratio in ratios)
    lines += [
        "",
        f"{len(off)} configurations: off by {statistics.median(off):.1%} in the median, "
        f"{off[-1]:.1%} at most.",
    ]
    return lines


def _said(link: tuple[float, float]) -> str:
    return f"{8e-6 * link[1]:,.0f} Mbit/s, {1000 * link[0]:.2f} ms"


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", nargs="+", default=["2x2", "4x1", "2x4"])
    parser.add_argument("--megabits", nargs="+", type=float, default=[1000.0, 100.0])
    parser.add_argument("--delays", nargs="+", type=float, default=[0.1, 5.0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the configurations, fewer steps")
    parser.add_argument("--keep", action="store_true", help="write results/cluster.txt and .json")
    for hidden in ("--work", "--ask"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--relay", nargs="+", help=argparse.SUPPRESS)
    for number in ("--rate", "--delay"):
        parser.add_argument(number, type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.relay:
        relay(given.relay, given.rate, given.delay)
    elif given.serve:
        serve()
    elif given.ask:
        ask(given.ask)
    elif given.work:
        work(given.work, given.quick)
    else:
        if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
            raise SystemExit("network namespaces and tun devices need root, and Linux")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is taken down
        data: dict[str, Any] = {"machine": machine(), "clusters": []}
        for layout, megabits, delay in product(given.layout, given.megabits, given.delays):
            try:
                data["clusters"].append(one(layout, megabits, delay, quick=given.quick))
            except SystemExit as error:  # the others are measured all the same, and this is told
                data.setdefault("failed", []).append(f"{layout}, {megabits:g} Mbit/s, {delay:g} ms: {error}")
                print(data["failed"][-1], file=sys.stderr, flush=True)
                continue
            print(report(data)[-1], f"load {load():.1f}", file=sys.stderr, flush=True)
            if given.keep:
                (RESULTS / "cluster.txt").write_text("\n".join(report(data)) + "\n")
                (RESULTS / "cluster.json").write_text(json.dumps(data, indent=1) + "\n")
        print("\n".join([*report(data), *data.get("failed", [])]))
        if data.get("failed"):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
