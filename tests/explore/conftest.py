"""A client of the server without a network, and a browser where this machine has one."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="needs the extra counterflow[explore]")
pytest.importorskip("httpx", reason="starlette's test client needs httpx")

from collections.abc import Iterator
from typing import Any

from starlette.testclient import TestClient

from counterflow.explore.web_app import HEADER, application

ASKS = {HEADER: "page"}


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(application(), base_url="http://127.0.0.1:8765", headers=ASKS) as test_client:
        yield test_client


def post(client: TestClient, path: str, body: Any) -> Any:
    """The answer to a request that is right."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: TestClient, path: str, body: Any) -> str:
    """The error of a wrong request."""
    answer = client.post(path, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    said = answer.json()
    assert list(said) == ["error"]
    return str(said["error"])
