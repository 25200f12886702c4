"""Gloo's network between machines is found where a host's own name leads to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from counterflow.common import network_interfaces


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine whose name is 127.0.1.1, with two networks; the hosts that ways were asked to."""
    asked: list[str] = []

    def towards(host: str) -> str | None:
        asked.append(host)
        return {"other": "10.0.0.5", "itself": "127.0.0.1"}.get(host, "192.168.1.5")

    monkeypatch.delenv(network_interfaces.CHOICE, raising=False)
    monkeypatch.setattr(network_interfaces, "address_of_this_host", lambda: "127.0.1.1")
    monkeypatch.setattr(network_interfaces, "source_towards", towards)
    networks = {"127.0.0.1": "lo", "10.0.0.5": "ib0", "192.168.1.5": "eth0"}
    monkeypatch.setattr(network_interfaces, "interfaces", lambda: networks)
    yield asked
    os.environ.pop(network_interfaces.CHOICE, None)


@pytest.mark.parametrize(("host", "name"), [("other", "ib0"), ("itself", "eth0")])
def test_the_network_to_where_all_meet(chosen: list[str], host: str, name: str) -> None:
    network_interfaces.choose(host)
    assert os.environ[network_interfaces.CHOICE] == name
    assert chosen[0] == host


def test_what_the_user_chose_stays(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network_interfaces.CHOICE, "eth7")
    network_interfaces.choose("other")
    assert (os.environ[network_interfaces.CHOICE], chosen) == ("eth7", [])


def test_a_name_that_others_reach_is_left_to_gloo(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interfaces, "address_of_this_host", lambda: "10.0.0.5")
    network_interfaces.choose("other")
    assert network_interfaces.CHOICE not in os.environ


def test_this_machine_has_a_loopback() -> None:
    assert network_interfaces.source_towards("127.0.0.1") == "127.0.0.1"
    assert network_interfaces.interfaces().get("127.0.0.1") == "lo"
