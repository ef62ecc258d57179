"""The Containerfile fits the tree and the command it starts."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.cli import invoke

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()


def arguments(instruction: str) -> list[str]:
    """What stands behind each `instruction`."""
    return [line.removeprefix(instruction).strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in arguments("COPY") if "--from" not in line for name in line.split()[:-1]}
    assert copied == kept
    assert not [name for name in copied if not (ROOT / name).exists()]


def test_the_command_has_these_options_and_listens_where_health_is_asked() -> None:
    (entry,), (command,) = arguments("ENTRYPOINT"), arguments("CMD")
    assert json.loads(entry) == ["tamis"]
    name, *options = json.loads(command)
    usage = invoke(name, "--help")
    assert usage.code == 0
    assert all(option in usage.out for option in options if option.startswith("--"))
    (port,) = arguments("EXPOSE")
    assert re.search(rf"--port .*\[default: {port}\]", re.sub(r"\s+", " ", usage.out))
    assert f"127.0.0.1:{port}'" in health_command()[-1]


def health_command() -> list[str]:
    (check,) = arguments("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert isinstance(command, list)
    return command


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_health_is_asked_for_without_a_proxy(status: int | None, code: int) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status or 0 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_port
        thread = threading.Thread(target=server.handle_request)
        if status is None:
            server.server_close()  # nobody listens
        else:
            thread.start()
        _, *rest, program = health_command()
        program = program.replace(":8000'", f":{port}'")
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}
        done = subprocess.run(
            [sys.executable, *rest, program], env=environment, capture_output=True, timeout=60, check=False
        )
        if status is not None:
            thread.join()
    assert done.returncode == code, done.stderr


def test_every_stage_has_the_same_python() -> None:
    assert len({line.partition(" AS ")[0] for line in arguments("FROM")}) == 1
