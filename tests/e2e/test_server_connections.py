"""Clients that hang up, dawdle, send too much or come in crowds; servers that stop. No page is lost."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.asgi import Client, call
from support.engines import make_engine, model_of
from support.serving import Brake, Running, all_pages_back, eventually, serving, write_byte_model
from tamis.engine.async_engine import AsyncEngine
from tamis.server.app import create_app
from tamis.server.config import ServerConfig

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
IDS: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0, "logprobs": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_byte_model(tmp_path_factory.mktemp("model"))
    engine = AsyncEngine(path, kv_budget="8MiB", kernels="reference")
    config = ServerConfig(port=0, header_timeout=0.3, body_timeout=0.3, max_body=1 << 20, max_header=8192, drain=5)
    with serving(engine, config) as running:
        yield running
        assert all_pages_back(engine)


@contextmanager
def held(config: ServerConfig | None = None) -> Iterator[tuple[Running, Brake]]:
    """A server whose engine takes no step until its brake is let go."""
    engine = make_engine(pages=64)
    brake = Brake(engine)
    front = AsyncEngine.from_engine(engine)
    try:
        with serving(front, config) as running:
            yield running, brake
            brake.let_go()
        engine.check()
        assert engine.stats.pages_used == 0
    finally:
        brake.let_go()


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as sock:
        yield sock


def read_answer(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error object; the server must close the connection."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    error = json.loads(response.read())["error"]
    assert sock.recv(1) == b""
    return response.status, error


def healthy(server: Running) -> None:
    with server.http() as client:
        reply = client.post("/v1/completions", json={**LONG, "max_tokens": 2})
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == 2


def test_a_client_that_hangs_up_on_a_stream_ends_its_request(server: Running) -> None:
    """Field case E5."""
    with server.http() as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            next(lines)
    eventually(lambda: all_pages_back(server.engine))


def test_a_client_that_hangs_up_on_a_whole_reply_ends_its_request(server: Running) -> None:
    """Field case E5."""
    with connected(server) as sock:
        body = json.dumps(LONG).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        eventually(lambda: server.engine.stats.running == 1)
    before = server.engine.stats.decode_tokens
    eventually(lambda: all_pages_back(server.engine))
    assert server.engine.stats.decode_tokens - before < 1000


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_headers_that_do_not_come_are_not_waited_for(server: Running, sent: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(sent)
        status, error = read_answer(sock)
    assert (status, error["code"]) == (408, "header_timeout")


def test_headers_that_come_a_byte_at_a_time_are_not_waited_for(server: Running) -> None:
    """A clock that every byte sets back would never strike."""
    with connected(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic()
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                try:
                    sock.sendall(b"x")
                except OSError:
                    return

        sock.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert b" 408 " in sock.recv(100)
        finally:
            stop.set()
            dripping.join()
        assert time.monotonic() - began < 5


def test_a_second_request_on_a_connection_has_the_same_time(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        first = http.client.HTTPResponse(sock)
        first.begin()
        assert (first.status, first.read()) == (200, b'{"status":"ok"}')
        sock.sendall(b"GET /hea")
        assert read_answer(sock)[0] == 408


def test_a_body_that_does_not_come_is_not_waited_for(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        sock.settimeout(20)
        status, error = read_answer(sock)
    assert (status, error["code"]) == (408, "body_timeout")
    healthy(server)


def test_headers_over_the_limit_are_refused(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 9000)
        status, error = read_answer(sock)
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "8192" in error["message"]


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"]
)
def test_what_is_not_http_is_refused_in_json(server: Running, sent: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(sent)
        status, error = read_answer(sock)
    assert (status, error["code"]) == (400, "invalid_http")


def test_a_body_of_100_mb_is_refused_to_a_client_that_sends_it_all(server: Running) -> None:
    with server.http() as client:
        reply = client.post("/v1/completions", content=b"x" * 100_000_000, headers={"content-type": "application/json"})
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"
        assert "100000000" in reply.json()["error"]["message"]
    healthy(server)


def test_a_body_without_a_declared_length_is_counted(server: Running) -> None:
    def blocks() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * (1 << 16)

    with server.http() as client:
        reply = client.post("/v1/completions", content=blocks(), headers={"content-type": "application/json"})
        assert reply.status_code == 413
    healthy(server)


def test_requests_beyond_the_queue_are_refused_and_the_others_answered() -> None:
    """10,000 at once; every one of them is answered."""
    engine = make_engine(pages=64, max_num_seqs=2)
    brake = Brake(engine)
    front = AsyncEngine.from_engine(engine, max_queue=8)
    app = create_app(front)
    body = json.dumps({**IDS, "max_tokens": 2}).encode()
    headers = [(b"content-type", b"application/json")]

    async def one() -> tuple[int | None, str | None, str]:
        answer = await call(app, Client(body), {**_post(), "headers": headers})
        return answer.status, answer.headers.get("retry-after"), answer.body.decode()

    async def crowd() -> list[tuple[int | None, str | None, str]]:
        asking = [asyncio.create_task(one()) for _ in range(10_000)]
        while sum(task.done() for task in asking) < 9_980:
            await asyncio.sleep(0.01)
        brake.let_go()
        answers = await asyncio.gather(*asking)
        await front.aclose(drain=10)
        return answers

    answers = asyncio.run(crowd())
    refused = [answer for answer in answers if answer[0] != 200]
    assert 8 <= 10_000 - len(refused) <= 20
    assert {(status, after) for status, after, _ in refused} == {(503, "1")}
    assert all("max_queue=8" in text for _, _, text in refused)
    engine.check()
    assert engine.stats.pages_used == 0


def _post() -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "client": None}  # fmt: skip


def test_running_replies_end_when_the_server_stops_and_new_ones_are_refused() -> None:
    with held(ServerConfig(port=0, drain=20)) as (server, brake), server.http() as client:
        with client.stream("POST", "/v1/completions", json={**IDS, "stream": True}) as reply:
            assert reply.status_code == 200
            assert brake.entered.wait(timeout=20)
            server.server.should_exit = True
            eventually(lambda: _refuses(server))
            brake.let_go()
            lines = [line for line in reply.iter_lines() if line]
        server.thread.join(timeout=20)
        assert not server.thread.is_alive()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


def _refuses(server: Running) -> bool:
    try:
        with connected(server):
            return False
    except ConnectionRefusedError:
        return True


def test_replies_that_outlast_the_drain_end_with_an_error() -> None:
    with (
        held(ServerConfig(port=0, drain=0.1)) as (server, brake),
        server.http() as client,
        client.stream("POST", "/v1/completions", json={**IDS, "stream": True}) as reply,
    ):
        assert brake.entered.wait(timeout=20)
        server.server.should_exit = True
        threading.Timer(0.5, brake.let_go).start()
        lines = [line for line in reply.iter_lines() if line]
    error = json.loads(lines[-1][6:])["error"]
    assert error["code"] == "shutting_down"
    assert "[DONE]" not in lines[-1]


def test_an_engine_that_has_died_is_told_to_everybody() -> None:
    with held() as (server, brake), server.http() as client:
        model_of(server.engine._engine).fail_at_token = 6
        brake.let_go()
        # The third failure in a row is the end; until then it may have been the request's fault.
        statuses = [client.post("/v1/completions", json=IDS).status_code for _ in range(3)]
        assert statuses == [500, 500, 500]
        eventually(lambda: client.get("/health").status_code == 503)
        health, refused = client.get("/health").json(), client.post("/v1/completions", json=IDS)
        assert health["error"]["code"] == "engine_dead"
        assert "the kernel failed" in health["error"]["message"]
        assert refused.status_code == 503
        assert client.get("/metrics").status_code == 200


def test_a_failed_step_is_the_error_of_its_own_request() -> None:
    with held() as (server, brake), server.http() as client:
        model_of(server.engine._engine).nan_after = 9
        brake.let_go()
        failed = client.post("/v1/completions", json={**IDS, "prompt": [9]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "broken_logits")
        assert client.post("/v1/completions", json=IDS).status_code == 200
        with client.stream("POST", "/v1/completions", json={**IDS, "prompt": [9], "stream": True}) as reply:
            (line,) = [line for line in reply.iter_lines() if line]
        assert json.loads(line[6:])["error"]["code"] == "broken_logits"


def test_keys_and_origins_are_checked() -> None:
    config = ServerConfig(port=0, api_keys=("one", "two"), cors_origins=("https://example.org",))
    with held(config) as (server, _), server.http() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200
        assert client.get("/health").status_code == 200
        asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
        assert client.options("/v1/models", headers=asked).headers["access-control-allow-origin"] == asked["origin"]
        other = client.get("/v1/models", headers={"origin": "https://elsewhere.org"})
        assert "access-control-allow-origin" not in other.headers


def test_without_origins_no_page_in_a_browser_is_let_in(server: Running) -> None:
    with server.http() as client:
        headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
        assert not any(
            name.startswith("access-control") for name in client.options("/v1/models", headers=headers).headers
        )
        sent = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert sent.status_code == 415


def test_a_connection_serves_many_requests(server: Running) -> None:
    with httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(5):
            assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
            with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 2, "stream": True}) as reply:
                assert b"[DONE]" in reply.read()
