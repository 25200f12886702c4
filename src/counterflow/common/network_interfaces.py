"""Network interface of Gloo between machines, for hosts whose name resolves to a loopback address.

Gloo listens on the address of the host's name. On Debian that is 127.0.1.1 in /etc/hosts, which no other
machine reaches. Then the interface is chosen that leads to the host where all workers meet.

Invariant: a user's choice (``GLOO_SOCKET_IFNAME``) stays, and so does torch's if other machines can reach it.
It opens no connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

CHOICE = "GLOO_SOCKET_IFNAME"

_ANYWHERE = "192.0.2.1"
"""An address reserved for documentation: no host has it, so the default route leads to it."""

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""

_PORT = 9
"""Any port; nothing is sent there."""


def choose(address: str) -> None:
    """Choose an interface for Gloo, if the host's name resolves to a loopback address.

    Args:
        address: the host where all workers meet.
    """
    if CHOICE in os.environ or not is_loopback(address_of_this_host()):
        return
    for towards in (address, _ANYWHERE):  # where all meet here, the first probe does not leave the machine
        source = source_towards(towards)
        if source is not None and not is_loopback(source):
            name = interfaces().get(source)
            if name is not None:
                os.environ[CHOICE] = name
                return


def address_of_this_host() -> str | None:
    """Address of this host's name; None if it has none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return None


def source_towards(host: str) -> str | None:
    """IPv4 address of this machine on the route to another one; None if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _PORT))  # of a datagram: nothing is sent
        return str(probe.getsockname()[0])
    return None


def interfaces() -> dict[str, str]:
    """Names of this machine's network interfaces, by IPv4 address."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


def is_loopback(address: str | None) -> bool:
    """True if only this machine reaches the address, or if there is none.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("::1"), is_loopback(None)
    (True, False, True, True)
    """
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback
