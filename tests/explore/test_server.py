"""Access to the server, and its errors for wrong requests."""

from __future__ import annotations

import random
import re
import socket
import threading
from http.client import HTTPConnection
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra counterflow[explore]")

import uvicorn
from starlette.testclient import TestClient

from counterflow.errors import ConfigError
from counterflow.explore.serve import listening
from counterflow.explore.web_app import HEADER, STATIC, application

from .conftest import ASKS, refused

PATHS = (
    *("/api/look", "/api/check", "/api/file", "/api/download", "/api/run", "/api/job", "/api/compare"),
    *("/api/plan/open", "/api/plan/save"),
)


def test_pages_load_nothing_from_elsewhere(client: TestClient) -> None:
    first = client.get("/", follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (307, "/schedules")
    page = client.get("/schedules")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        known = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|@import|url\(|innerHTML|eval\(", known), path.name
        assert client.get(f"/static/{path.name}").status_code == 200
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text):
        assert client.get(name).status_code == 200
    assert client.get("/static/timeline.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/static/..%2fapp.py").status_code == 404
    assert client.get("/static/app.py").status_code == 404


def test_another_sites_page_cannot_ask() -> None:
    """It can neither send the header nor be of this host; nor can a name that leads to this machine."""
    body = {"subjects": [{"scheme": "dapple", "options": {"stages": 2, "micro_batches": 2}}]}
    with TestClient(application(), base_url="http://127.0.0.1:8765") as client:
        assert client.post("/api/look", json=body).status_code == 403
        assert client.post("/api/look", json=body, headers=ASKS).status_code == 200
        evil = ASKS | {"Origin": "http://evil.example"}
        assert client.post("/api/look", json=body, headers=evil).status_code == 403
        assert client.post("/api/look", json=body, headers=ASKS | {"Origin": "null"}).status_code == 403
        same_host = ASKS | {"Origin": "http://127.0.0.1:9999"}
        assert client.post("/api/look", json=body, headers=same_host).status_code == 200
        foreign_host = ASKS | {"Host": "evil.example:8765"}
        assert client.get("/schedules", headers=foreign_host).status_code == 403
        assert client.get("/schedules", headers={"Host": "[::1"}).status_code == 403
        preflight = client.options("/api/look", headers={"Origin": "http://evil.example"})
        assert preflight.status_code >= 400
        assert "access-control-allow-origin" not in preflight.headers


def test_every_address_of_this_machine_alone_is_answered() -> None:
    for host, code in (("127.0.0.2", 200), ("[::1]", 200), ("127.0.0.1.example", 403), ("0.0.0.0", 403)):
        with TestClient(application(), base_url=f"http://{host}:8765") as client:
            assert client.get("/schedules").status_code == code, host


def test_beyond_this_machine_a_token_is_asked_for() -> None:
    with TestClient(application("secret"), base_url="http://machine:80") as client:
        assert client.get("/schedules").status_code == 200
        assert client.get("/api/schemes", headers=ASKS).status_code == 401
        assert client.get("/api/schemes", headers={HEADER: "secret"}).status_code == 200
        assert client.get("/api/schemes", headers=[(HEADER.encode(), "sécret".encode())]).status_code == 401


def test_a_taken_port_is_told() -> None:
    with listening("127.0.0.1", 0) as server_socket:
        port = server_socket.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: Address already in use; --port 0"):
            listening("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        listening("no.such.host.invalid", 0)


def test_slow_clients_stop_nobody() -> None:
    """Fifty that have begun a request and send nothing more, and one that is answered meanwhile."""
    with listening("127.0.0.1", 0) as server_socket:
        served = uvicorn.Server(uvicorn.Config(application(), log_level="error"))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [server_socket]}, daemon=True)
        thread.start()
        try:
            address = server_socket.getsockname()
            head = (
                f"POST /api/look HTTP/1.1\r\nHost: {address[0]}\r\n{HEADER}: page\r\nContent-Length: 999\r\n"
            )
            slow = [socket.create_connection(address, timeout=60) for _ in range(50)]
            for number, connection_ in enumerate(slow):
                connection_.sendall(head.encode() + b"\r\n" * (number % 2) + b"{" * (number % 2))
            connection = HTTPConnection(address[0], address[1], timeout=60)
            connection.request("GET", "/api/schemes", headers=ASKS)
            assert connection.getresponse().status == 200
            connection.close()
            for connection_ in slow:
                connection_.close()
        finally:
            served.should_exit = True
            thread.join(60)


def test_sentences(client: TestClient) -> None:
    look: dict[str, Any] = {"subjects": [{"scheme": "dapple", "options": {"stages": 2, "micro_batches": 2}}]}
    assert "subjects: Field required" in refused(client, "/api/look", {})
    unknown = {"subjects": [{"scheme": "chimaera"}]}
    assert "did you mean 'chimera'" in refused(client, "/api/look", unknown)
    wrong, short = (look["subjects"][0] | {"costs": {"forward": text}} for text in ("x", "1,2,3"))
    assert "forward=x: cannot read 'x'" in refused(client, "/api/look", {"subjects": [wrong]})
    assert "forward: 3 numbers for 2 stages" in refused(client, "/api/look", {"subjects": [short]})
    second = refused(client, "/api/look", {"subjects": [*look["subjects"], wrong]})
    assert second.startswith("second schedule: forward=x")
    assert "dapple needs micro_batches" in refused(
        client, "/api/look", {"subjects": [{"scheme": "dapple", "options": {"stages": 2}}]}
    )
    assert client.get("/api/look").status_code == 405
    assert client.get("/api/nothing").json() == {"error": "Not Found"}
    assert client.post("/api/look", content=b"x" * 8_000_001).status_code == 413


def test_a_thousand_wrong_requests(client: TestClient) -> None:
    """Whatever is asked, the answer is right or says in a sentence what is wrong."""
    chance = random.Random(0)
    for _ in range(1000):
        path = chance.choice(PATHS)
        answer = client.post(path, content=_text(chance) if chance.random() < 0.1 else _body(chance, path))
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert list(answer.json()) == ["error"]
            assert "Traceback" not in answer.text


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 3, 4, 10**30, 1e300, "", "x", "1,2", "nan", "inf", "-1", "1e400", "٣", [], {}),
    *("9" * 5000, "chimera", "dapple", "pipedream", "\u0000", [[1]], {"scheme": "gpipe"}),
)


def _body(chance: random.Random, path: str) -> bytes:
    import json

    names = (
        "stages",
        "workers",
        "micro_batches",
        "waves",
        "pairs",
        "periods",
        "concat",
        "split",
        "chunks",
        "odd",
    )
    scheme = chance.choice(("chimera", "dapple", "hanayo", "pipedream", "zb-h1", "interleaved", "mixpipe"))
    options = {name: chance.choice((1, 2, 3, 4, *ODD)) for name in chance.sample(names, chance.randrange(5))}
    subject: dict[str, Any] = {"scheme": scheme, "options": {"stages": 4, "micro_batches": 4} | options}
    if chance.random() < 0.3:
        subject["moves"] = [
            {key: chance.choice((0, 1, 2, 5, *ODD)) for key in ("worker", "start", "stop")}
            for _ in range(chance.randrange(3))
        ]
    costs = {
        name: chance.choice(("1", "0.5", *ODD))
        for name in chance.sample(
            (
                "forward",
                "backward",
                "p2p",
                "sync",
                "agreement",
                "link",
                "overlap",
                "replicas",
                "costs_of",
                "weight_bytes",
            ),
            chance.randrange(4),
        )
    }
    subject["costs"] = costs
    body: dict[str, Any] = {"subjects": [subject]}
    if path == "/api/check":
        body = {"subject": subject}
    if path == "/api/run":
        body = {"runs": [{"name": chance.choice(ODD), "metrics": chance.choice(ODD)}]}
    if path == "/api/job":
        body = {"job": chance.choice(ODD), "stop": chance.choice(ODD)}
    if path.startswith("/api/plan/"):
        body = {"job": chance.choice(ODD), "plan": chance.choice(ODD)}
    if path == "/api/download":
        body["form"] = chance.choice(("csv", "schedule", *ODD))
    if path == "/api/file":
        body = {"name": "x", "text": chance.choice(("{}", "[]", '{"format": "counterflow-schedule"}'))}
    if chance.random() < 0.4:
        body[chance.choice((*body, "peak", "memory", "odd"))] = chance.choice(ODD)
    return json.dumps(body).encode()


def _text(chance: random.Random) -> bytes:
    texts = (b"", b"{", b"\xff", b"null", b"[" * 100_000, b"1" * 10_000, b'{"subjects": NaN}', b'"\\ud800"')
    return chance.choice(texts)
