"""The command: it tells an address that answers, and ends with Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra counterflow[explore]")


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    """Where runs are named, their page is the first."""
    command = [sys.executable, "-m", "counterflow", "explore", "--no-open", "--port", "0", str(tmp_path)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            address = re.fullmatch(
                r"Open http://127\.0\.0\.1:(\d+)/runs \(Ctrl-C ends\)\n", process.stderr.readline()
            )
            assert address is not None
            connection = HTTPConnection("127.0.0.1", int(address[1]), timeout=60)
            connection.request("GET", "/schedules")
            assert connection.getresponse().status == 200
            connection.close()
            assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
