"""Nodes on one machine: network namespaces whose only ways out go through a relay in user space.

Each namespace has a tun device; the relay takes packets from one and gives them to another, at a rate and
after a delay (netem is not in every kernel). Needs root, and Linux. The relay and what measures it run as
programs of this file.
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
from pathlib import Path
from typing import Any

MTU = 64_000


def name_of(node: int) -> str:
    """The namespace of a node; of this process alone."""
    return f"cfb{os.getpid() % 10_000}n{node}"


def run(*words: str) -> None:
    """A command that has to work."""
    subprocess.run(words, check=True, capture_output=True, text=True)


def require_namespaces() -> None:
    """End the program in one sentence where nodes cannot be made."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise SystemExit("network namespaces and tun devices need root, and Linux")


@contextlib.contextmanager
def nodes(count: int, megabits: float, delay_seconds: float) -> Iterator[list[str]]:
    """Namespaces with a way to each other, and the relay between them."""
    require_namespaces()
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
        # Who has more than its share in flight is not read from: its packets wait where they are.
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


def one_a_node(names: list[str], *words: str) -> list[subprocess.Popen[str]]:
    """A command on each node, as the only worker there of one group that meets at the first node."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "cf0", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29501", "WORLD_SIZE": str(len(names))}
    environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [
        inside(name, *words, env=environment | {"RANK": str(rank), "GROUP_RANK": str(rank)})
        for rank, name in enumerate(names)
    ]


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


def main() -> None:
    """What runs beside: the relay, and both ends of a socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ask")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--relay", nargs="+")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--delay", type=float)
    given = parser.parse_args()
    if given.relay:
        relay(given.relay, given.rate, given.delay)
    elif given.serve:
        serve()
    else:
        ask(given.ask)


if __name__ == "__main__":
    main()
