"""Addresses of the server: which are of this machine alone, and what others open."""

from __future__ import annotations

import ipaddress
import socket

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that no machine has; a route to them shows this machine's own address, and nothing is sent."""


def is_here(host: str) -> bool:
    """Check that only this machine can reach a host name.

    >>> is_here("127.0.0.1"), is_here("127.0.0.2"), is_here("localhost"), is_here("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable(host: str) -> str:
    """The host that others open, for a server that listens on ``host``, in the form of an address of a page.

    >>> reachable("::1"), reachable("machine"), reachable("0.0.0.0") in {"0.0.0.0", "::"}
    ('[::1]', 'machine', False)
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        host = _own_address(socket.AF_INET if address.version == 4 else socket.AF_INET6)
    return f"[{host}]" if ":" in host else host


def _own_address(family: socket.AddressFamily) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
