# SPDX-License-Identifier: Apache-2.0
"""Every HTTP reply has one form: an id, the CORS headers of an allowed site, errors as OpenAI spells them."""

import asyncio
import itertools

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from server.core.errors import CODES, ServerError, error_of
from server.gateway.access.origins import OriginPolicy
from server.gateway.http import replies
from server.gateway.http.replies import Edge, error_response, on_http_exception, on_server_error, read_body

SHOP = "https://shop.example"


async def fine(request):
    return PlainTextResponse("fine")


async def refused(request):
    raise error_of("queue_full", "full", retry_after_ms=2500)


async def broken(request):
    raise RuntimeError("a secret of ours")


async def broken_late(request):
    async def body():
        yield b"half"
        raise RuntimeError("a secret of ours")

    return StreamingResponse(body())


async def left(request):
    raise ClientDisconnect


@pytest.fixture
def seen():
    return []


@pytest.fixture
def client(seen):
    ids = itertools.count()
    app = Starlette(
        routes=[
            Route("/v1/fine", fine, methods=["GET", "POST"]),
            *(Route(f"/{door.__name__}", door) for door in (fine, refused, broken, broken_late, left)),
        ],
        exception_handlers={ServerError: on_server_error, HTTPException: on_http_exception},
        middleware=[
            Middleware(
                Edge,
                origins=OriginPolicy.parse([SHOP]),
                new_id=lambda prefix: f"{prefix}_{next(ids)}",
                on_error=seen.append,
            )
        ],
    )
    with TestClient(app) as client:
        yield client


def check_error(reply, status, code):
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


# ---- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_a_reply(code):
    """Status by the table; retry times exactly where a retry may help soon, and both units agree."""
    reply = error_response(error_of(code, "m"))
    assert reply.status_code == CODES[code].http_status
    assert ("retry-after-ms" in reply.headers) is (CODES[code].http_status in (429, 503))


@pytest.mark.parametrize(
    ("wait_ms", "seconds", "milliseconds"),
    [
        (None, "1", "1000"),
        (0, "1", "0"),
        (1, "1", "1"),
        (1000, "1", "1000"),
        (2500, "3", "2500"),
    ],
)
def test_retry_times_are_rounded_up(wait_ms, seconds, milliseconds):
    """A client that knows only seconds never comes too early."""
    headers = error_response(error_of("queue_full", "m", retry_after_ms=wait_ms)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == (seconds, milliseconds)


def test_unknown_paths_and_methods_are_in_our_form(client):
    """Starlette's own plain texts never reach a client."""
    check_error(client.get("/v1/nothing"), 404, "not_found")
    reply = client.delete("/v1/fine")
    check_error(reply, 405, "method_not_allowed")
    assert "GET" in reply.headers["allow"]


def test_a_bug_answers_one_request_and_shows_nothing(client, caplog):
    """The client learns that we failed, the log learns why, and the next request is served."""
    error = check_error(client.get("/broken"), 500, "internal_error")
    assert "secret" not in str(error)
    assert ["request_failed"] == [record.msg for record in caplog.records if record.levelname == "ERROR"]
    assert client.get("/fine").status_code == 200


def test_a_bug_in_mid_stream_cuts_the_reply(client, caplog):
    """Half an answer is not completed to look whole."""
    assert client.get("/broken_late").content == b"half"
    assert "request_failed" in [record.msg for record in caplog.records]


async def test_a_client_that_left_is_no_error(client, caplog, seen):
    """Nothing is sent, nothing is logged as a fault."""
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/left",
        "headers": [],
        "scheme": "http",
        "query_string": b"",
    }
    await client.app(scope, receive, send)
    assert not sent
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert not seen


# ---- ids, headers, metrics -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("proxy-7_A", "proxy-7_A"),
        ("", "req_0"),
        ("a b", "req_0"),
        ("x" * 65, "req_0"),
        ('"><script>', "req_0"),
    ],
)
def test_a_request_has_an_id(client, asked, expected):
    """A proxy's own id is kept if it is harmless; else we draw one."""
    assert client.get("/fine", headers={"x-request-id": asked}).headers["x-request-id"] == expected


def test_every_reply_is_safe_and_logged_by_its_route(client, seen, caplog):
    """Sniffing is off; the log has routes, never a client's path; errors are counted by their code."""
    caplog.set_level("DEBUG", logger=replies.__name__)
    for path in ("/fine", "/nothing/SECRET?SECRET", "/refused", "/broken"):
        headers = client.get(path, headers={"authorization": "Bearer SECRET"}).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["vary"] == "Origin"
    lines = [record for record in caplog.records if record.msg == "http_request"]
    assert [(line.route, line.status) for line in lines] == [
        ("/fine", 200),
        ("unrouted", 404),
        ("/refused", 429),
        ("/broken", 500),
    ]
    assert "SECRET" not in str([vars(record) for record in caplog.records])
    assert seen == ["not_found", "queue_full", "internal_error"]


# ---- websites --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/fine", "/v1/nothing", "/refused", "/broken", "/fine"])
def test_an_allowed_site_may_read_every_reply(client, path):
    """Errors too, or a browser shows 'failed to fetch' for each of them; and never by the star."""
    headers = client.get(path, headers={"origin": SHOP}).headers
    assert headers["access-control-allow-origin"] == SHOP
    assert "retry-after" in headers["access-control-expose-headers"]
    assert "x-request-id" in headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://shop.example.evil.example"])
def test_any_other_site_is_refused_at_the_doors(client, origin):
    """Even a request that needs no preflight may not spend our time."""
    reply = client.post("/v1/fine", headers={"origin": origin, "content-type": "text/plain"}, content=b"{}")
    check_error(reply, 403, "origin_not_allowed")
    assert "access-control-allow-origin" not in reply.headers


def test_our_own_page_passes(client):
    """Same host and port as the request itself."""
    assert client.get("/v1/fine", headers={"origin": "http://testserver"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/fine", "/v1/nothing", "/broken"])
def test_a_preflight_runs_no_handler(client, path, seen):
    """It needs no key, and its answer depends on the origin alone."""
    asked = "authorization,content-type,x-stainless-os"
    headers = {"access-control-request-method": "POST", "access-control-request-headers": asked}
    reply = client.options(path, headers={"origin": SHOP, **headers})
    assert reply.status_code == 204
    assert reply.headers["access-control-allow-origin"] == SHOP
    assert reply.headers["access-control-allow-headers"] == asked
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert not seen
    other = client.options(path, headers={"origin": "https://evil.example", **headers})
    assert other.status_code == 204
    assert not [name for name in other.headers if name.startswith("access-control-allow")]


def test_a_preflight_can_not_write_headers(client):
    """What is echoed is plain names only."""
    headers = {"origin": SHOP, "access-control-request-method": "POST", "access-control-request-headers": "a:b"}
    assert client.options("/v1/fine", headers=headers).headers["access-control-allow-headers"] == (
        "authorization, content-type"
    )


# ---- bodies ----------------------------------------------------------------------------------------------


def request_of(*chunks):
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks[:-1]]
    left = iter([*messages, {"type": "http.request", "body": chunks[-1], "more_body": False}])

    async def receive():
        return next(left)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_a_body_up_to_the_limit_is_read():
    """In any chunks, to the last byte."""
    assert await read_body(request_of(b"ab", b"", b"cd"), 4) == b"abcd"


async def test_a_body_over_the_limit_is_read_to_its_end_and_refused():
    """The sender has to be done before it reads an answer, so a little more is taken and thrown away."""
    request = request_of(b"ab", b"cde", b"f")
    with pytest.raises(ServerError, match="larger than 4 bytes"):
        await read_body(request, 4)
    with pytest.raises(RuntimeError):
        await anext(request.stream())


async def test_a_body_without_end_is_cut(monkeypatch):
    """Past the excess nothing more is taken."""
    monkeypatch.setattr(replies, "EXCESS_BYTES_MAX", 8)
    taken = []

    async def receive():
        taken.append(1)
        return {"type": "http.request", "body": b"x" * 4, "more_body": True}

    with pytest.raises(ServerError, match="larger"):
        await read_body(Request({"type": "http", "method": "POST", "headers": []}, receive), 4)
    assert len(taken) == 4


@pytest.mark.parametrize(("first", "code"), [(b"ab", "request_timeout"), (b"abcdef", "payload_too_large")])
async def test_a_slow_body_is_cut(monkeypatch, first, code):
    """A body has its time, and what is too large has less."""
    monkeypatch.setattr(replies, "BODY_WAIT_S", 0.01)
    monkeypatch.setattr(replies, "EXCESS_WAIT_S", 0)
    chunks = [{"type": "http.request", "body": first, "more_body": True}]

    async def receive():
        return chunks.pop() if chunks else await asyncio.Event().wait()

    with pytest.raises(ServerError) as caught:
        await read_body(Request({"type": "http", "method": "POST", "headers": []}, receive), 4)
    assert caught.value.code == code
