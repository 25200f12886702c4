"""From an address to a running server: the port is bound before the address is reported."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import webbrowser
from collections.abc import Callable
from threading import Thread

import uvicorn
from starlette.applications import Starlette

from counterflow.errors import ConfigError

from .address import is_here, reachable


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

    Raises:
        ConfigError: it cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server_socket = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}; give a name or an address of this machine") from None
    try:
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind(address)
        server_socket.listen(128)
    except OSError as error:
        server_socket.close()
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}; --port 0 takes one that is free"
        ) from None
    return server_socket


NICE = 10
"""How far the server, and what it starts, stands back where a training wants the same cores."""


def stand_back() -> None:
    """Lower this process's priority: a viewer must not slow down training on this machine."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICE)


def serve(
    make: Callable[[str | None], Starlette],
    host: str,
    port: int,
    *,
    page: str = "",
    opens: bool,
    report_address: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C.

    Args:
        make: function from a token to the application; requests must carry the token. None: only requests
            from this machine are accepted.
        host: host to listen on.
        port: port to listen on.
        page: page to open; the first one if empty.
        opens: whether a browser is opened.
        report_address: callback for the address.

    Raises:
        ConfigError: the address cannot be bound.
    """
    token = None if is_here(host) else secrets.token_urlsafe(24)
    with listening(host, port) as server_socket:
        address = f"http://{reachable(host)}:{server_socket.getsockname()[1]}/{page}" + (
            f"?token={token}" if token else ""
        )
        report_address(address)
        if opens:
            Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(
            make(token), log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        with contextlib.suppress(KeyboardInterrupt):  # what ends it
            uvicorn.Server(config).run(sockets=[server_socket])
