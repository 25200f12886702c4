"""Gloo's network between machines is found where a host's own name leads to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from counterflow.runtime.workers import interface


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine whose name is 127.0.1.1, with two networks; the hosts that ways were asked to."""
    asked: list[str] = []

    def towards(host: str) -> str | None:
        asked.append(host)
        return {"other": "10.0.0.5", "itself": "127.0.0.1"}.get(host, "192.168.1.5")

    monkeypatch.delenv(interface.CHOICE, raising=False)
    monkeypatch.setattr(interface, "address_of_this_host", lambda: "127.0.1.1")
    monkeypatch.setattr(interface, "source_towards", towards)
    networks = {"127.0.0.1": "lo", "10.0.0.5": "ib0", "192.168.1.5": "eth0"}
    monkeypatch.setattr(interface, "interfaces", lambda: networks)
    yield asked
    os.environ.pop(interface.CHOICE, None)


@pytest.mark.parametrize(("host", "name"), [("other", "ib0"), ("itself", "eth0")])
def test_the_network_to_where_all_meet(chosen: list[str], host: str, name: str) -> None:
    interface.choose(host)
    assert os.environ[interface.CHOICE] == name
    assert chosen[0] == host


def test_what_the_user_chose_stays(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interface.CHOICE, "eth7")
    interface.choose("other")
    assert (os.environ[interface.CHOICE], chosen) == ("eth7", [])


def test_a_name_that_others_reach_is_left_to_gloo(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "address_of_this_host", lambda: "10.0.0.5")
    interface.choose("other")
    assert interface.CHOICE not in os.environ


def test_this_machine_has_a_loopback() -> None:
    assert interface.source_towards("127.0.0.1") == "127.0.0.1"
    assert interface.interfaces().get("127.0.0.1") == "lo"
