"""Which network Gloo takes between machines, where a machine's own name says nothing of it.

Gloo listens on the address of the host's name. Debian and its like have that as 127.0.1.1 in /etc/hosts,
where no other machine gets to. Then the network is taken over which this machine reaches the one where all
meet.

Invariant: what the user chose (``GLOO_SOCKET_IFNAME``) stays, and so does what torch would choose if others
can get there. It opens no connection.
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
"""An address of documentation: nobody has it, and the way to it is the default one."""

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""

_PORT = 9
"""Any; nothing is sent there."""


def choose(address: str) -> None:
    """Choose a network for Gloo, if the host's own name leads nowhere.

    Args:
        address: the host where all workers meet.
    """
    if CHOICE in os.environ or not is_loopback(address_of_this_host()):
        return
    for towards in (address, _ANYWHERE):  # where all meet here, the first way does not leave the machine
        source = source_towards(towards)
        if source is not None and not is_loopback(source):
            name = interfaces().get(source)
            if name is not None:
                os.environ[CHOICE] = name
                return


def address_of_this_host() -> str | None:
    """The address of this host's name; None if it has none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return None


def source_towards(host: str) -> str | None:
    """An IPv4 address of this machine, on the way to another one; None if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, _PORT))  # of a datagram: nothing is sent
        return str(way.getsockname()[0])
    return None


def interfaces() -> dict[str, str]:
    """Names of this machine's network interfaces, by IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def is_loopback(address: str | None) -> bool:
    """Whether only this machine gets there; so it is without an address.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("::1"), is_loopback(None)
    (True, False, True, True)
    """
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback
