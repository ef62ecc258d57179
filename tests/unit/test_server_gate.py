import asyncio
import logging
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from support.asgi import Answer, Client, call, scope_of
from tamis.metrics import ServerMetrics
from tamis.server.config import ServerConfig
from tamis.server.gate import Gate


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body and the tenant."""
    body = (await receive())["body"]
    headers = [(b"tenant", scope["state"]["tenant"].encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise ZeroDivisionError("secret")


async def broken_late(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ZeroDivisionError("secret")


def gate(app: ASGIApp = echo, metrics: ServerMetrics | None = None, **settings: Any) -> Gate:
    config = ServerConfig(**settings)
    return Gate(app, config=config, metrics=metrics or ServerMetrics(), paths={"/health", "/v1/completions"})


def ask(app: ASGIApp, *parts: bytes, headers: list[tuple[bytes, bytes]] | None = None, **where: Any) -> Answer:
    async def run() -> Answer:
        client = Client(*parts)
        asyncio.get_running_loop().call_later(0.05, client.hang_up)
        return await call(app, client, scope_of(headers=headers or [], **where))

    return asyncio.run(run())


def test_a_body_reaches_the_application_whole() -> None:
    assert ask(gate(), b"ab", b"", b"cd").body == b"abcd"


def test_every_answer_has_an_id_and_a_client_may_choose_it() -> None:
    assert ask(gate(), b"").headers["x-request-id"].startswith("req-")
    assert ask(gate(), b"", headers=[(b"x-request-id", b"mine-7")]).headers["x-request-id"] == "mine-7"


@pytest.mark.parametrize("chosen", [b"", b"a b", b"a\nb", b"x" * 129, b"\xff"])
def test_an_id_that_could_upset_a_log_is_replaced(chosen: bytes) -> None:
    assert ask(gate(), b"", headers=[(b"x-request-id", chosen)]).headers["x-request-id"].startswith("req-")


def test_a_log_line_has_the_id_the_status_and_the_path_as_it_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tamis.server")
    ask(gate(), b"", headers=[(b"x-request-id", b"mine")], path="/v1/%0a\u00e9")
    (record,) = caplog.records
    assert record.getMessage().startswith("192.0.2.1 POST /v1/%0a\\xc3\\xa9 200 0.")
    assert record.getMessage().endswith("s mine")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_and_its_connection_closed(declared: bool) -> None:
    headers = [(b"content-length", b"17")] if declared else []
    answer = ask(gate(max_body=16), b"x" * 10, b"x" * 7, headers=headers)
    assert answer.status == 413
    assert answer.error["code"] == "body_too_large"
    assert "17 bytes" in answer.error["message"]
    assert "16 bytes" in answer.error["message"]
    assert answer.headers["connection"] == "close"
    assert answer.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_a_body_of_exactly_the_limit_is_taken() -> None:
    assert ask(gate(max_body=16), b"x" * 16, headers=[(b"content-length", b"16")]).status == 200


def test_who_asks_before_sending_is_answered_without_waiting() -> None:
    headers = [(b"content-length", b"99"), (b"expect", b"100-continue")]

    async def run() -> Answer:
        async with asyncio.timeout(2):  # the client never hangs up
            return await call(gate(max_body=16), Client(), scope_of(headers=headers))

    assert asyncio.run(run()).status == 413


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def run() -> Answer:
        client = Client(b"a", complete=False)
        asyncio.get_running_loop().call_later(0.2, client.hang_up)
        return await call(gate(body_timeout=0.02), client)

    answer = asyncio.run(run())
    assert answer.status == 408
    assert answer.error["message"] == "the request's body did not come within 0.02 s"


def test_all_bodies_together_have_a_limit_and_their_room_comes_back() -> None:
    release = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()
        await echo(scope, receive, send)

    async def run() -> list[int | None]:
        app = gate(slow, max_body=10, max_bodies=15)
        first = asyncio.create_task(call(app, Client(b"x" * 10)))
        await asyncio.sleep(0)
        second = Client(b"x" * 10)
        second.hang_up()
        refused = await call(app, second)
        assert refused.error["code"] == "too_many_bodies"
        assert refused.headers["retry-after"] == "1"
        release.set()
        return [refused.status, (await first).status, (await call(app, Client(b"x" * 10))).status]

    assert asyncio.run(run()) == [503, 200, 200]


def test_a_client_that_hangs_up_early_is_counted_and_not_answered() -> None:
    metrics = ServerMetrics()

    async def run() -> Answer:
        client = Client(b"a", complete=False)
        client.hang_up()
        return await call(gate(metrics=metrics), client)

    assert asyncio.run(run()).messages == []
    assert 'tamis_http_requests_total{path="/v1/completions",status="499"} 1.0' in metrics.text().decode()
    assert "tamis_http_requests_active 0.0" in metrics.text().decode()


def test_keys_are_asked_for_before_anything_is_read() -> None:
    refused = ask(gate(api_keys=("k",)), b"x", path="/v1/models")
    assert refused.status == 401
    assert refused.error["code"] == "invalid_api_key"
    taken = ask(gate(api_keys=("k",)), b"x", headers=[(b"authorization", b"Bearer k")])
    assert taken.status == 200
    assert taken.headers["tenant"]
    assert ask(gate(api_keys=("k",)), b"", path="/health", method="GET").status == 200


def test_an_error_nobody_caught_is_answered_and_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(gate(broken), b"", headers=[(b"x-request-id", b"mine")])
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert answer.headers["x-request-id"] == "mine"
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "mine" in record.getMessage()
    assert record.exc_info is not None


def test_an_answer_that_has_begun_is_broken_off() -> None:
    with pytest.raises(ZeroDivisionError):
        ask(gate(broken_late), b"")


def test_unknown_paths_are_counted_together() -> None:
    metrics = ServerMetrics()
    for name in ("a", "b"):
        ask(gate(metrics=metrics), b"", path=f"/{name}")
    assert 'tamis_http_requests_total{path="other",status="200"} 2.0' in metrics.text().decode()


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_what_monitoring_asks_for_is_not_counted(path: str) -> None:
    metrics = ServerMetrics()
    seen: list[str] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(metrics.text().decode())
        await echo(scope, receive, send)

    app = gate(look, metrics)
    ask(app, b"", path=path, method="GET")
    ask(app, b"")
    assert "tamis_http_requests_active 0.0" in seen[0]
    assert "tamis_http_requests_active 1.0" in seen[1]
    counts = [line for line in metrics.text().decode().splitlines() if line.startswith("tamis_http_requests_total")]
    assert counts == ['tamis_http_requests_total{path="/v1/completions",status="200"} 1.0']
