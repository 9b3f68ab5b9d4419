# SPDX-License-Identifier: Apache-2.0
"""What a browser asks before it lets a page talk to us: origins, preflights, subprotocols."""

import httpx
import pytest

SHOP, EVIL = "https://shop.example", "https://evil.example"
ASK = {"messages": [{"role": "user", "content": "hi"}]}
WANTED = "authorization,content-type,x-stainless-arch,x-stainless-retry-count"


@pytest.fixture
async def browse():
    """An HTTP client without habits of its own."""
    async with httpx.AsyncClient() as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/realtime", "/chat"])
@pytest.mark.parametrize(
    ("origins", "status"),
    [
        ([SHOP], 101),
        (["HTTPS://Shop.Example"], 101),
        ([], 101),
        ([EVIL], 403),
        (["null"], 403),
        (["https://shop.example.evil.example"], 403),
        (["https://shop.example:8443"], 403),
        ([SHOP, SHOP], 400),
        (["http://shop.example"], 403),
    ],
)
async def test_a_page_opens_a_socket_or_not(serve, path, origins, status):
    """The upgrade itself is refused, as no other rule of a browser would stop it."""
    house = await serve()
    peer = await house.peer(path, headers=[f"Origin: {origin}" for origin in origins])
    assert peer.status == status
    assert house.drain.num_members == (status == 101)


async def test_our_own_page_opens_a_socket(serve):
    """Whatever host and port we are reached by."""
    house = await serve()
    assert (await house.peer(headers=[f"Origin: http://127.0.0.1:{house.port}"])).status == 101
    assert (await house.peer(headers=["Origin: http://127.0.0.1:1"])).status == 403


async def test_the_star_is_a_choice(serve, caplog):
    """It allows all, and is warned of at the start."""
    house = await serve(allowed_origins=("*",))
    assert "any_website_may_connect" in caplog.text
    assert (await house.peer(headers=[f"Origin: {EVIL}"])).status == 101


async def test_a_subprotocol_is_answered_and_a_key_is_not(serve):
    """Without the echo a browser drops the socket."""
    house = await serve()
    offered = "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.SECRET"
    peer = await house.peer(headers=[offered, f"Origin: {SHOP}"])
    assert peer.status == 101
    assert "sec-websocket-protocol: realtime\r\n" in peer.head.lower()
    assert "SECRET" not in peer.head


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/none"])
async def test_a_preflight_needs_no_key_and_runs_nothing(serve, browse, path):
    """Allowed for the listed site alone, with the headers that the SDK sends."""
    house = await serve()
    asked = {"access-control-request-method": "POST", "access-control-request-headers": WANTED}
    reply = await browse.options(f"{house.http}{path}", headers={"origin": SHOP, **asked})
    assert reply.status_code == 204
    assert reply.headers["access-control-allow-origin"] == SHOP
    assert reply.headers["access-control-allow-headers"] == WANTED
    assert "origin" in reply.headers["vary"].lower()
    other = await browse.options(f"{house.http}{path}", headers={"origin": EVIL, **asked})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("request_line", "body", "status"),
    [
        ("POST /v1/chat/completions", ASK, 200),
        ("POST /v1/chat/completions", {"model": "none", **ASK}, 404),
        ("POST /v1/chat/completions", {"pad": "x" * 300_000}, 413),
        ("GET /v1/chat/completions", None, 405),
        ("GET /v1/none", None, 404),
        ("GET /v1/realtime", None, 426),
    ],
)
async def test_every_reply_can_be_read_by_the_listed_site(serve, browse, request_line, body, status):
    """Errors above all, in JSON and with their id."""
    house = await serve("a")
    method, path = request_line.split()
    reply = await browse.request(method, f"{house.http}{path}", json=body, headers={"origin": SHOP})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == SHOP
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")


async def test_a_foreign_page_can_not_spend_our_time(serve, browse):
    """A form post needs no preflight, so it is refused by its origin."""
    house = await serve("a")
    headers = {"origin": EVIL, "content-type": "text/plain"}
    reply = await browse.post(f"{house.http}/v1/chat/completions", json=ASK, headers=headers)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers
    assert not house.generator.requests


async def test_probes_answer(serve, browse):
    """Alive, ready, and measured."""
    house = await serve("a")
    await browse.post(f"{house.http}/v1/chat/completions", json=ASK)
    assert (await browse.get(f"{house.http}/livez")).json() == {"status": "alive"}
    assert (await browse.get(f"{house.http}/readyz")).json()["status"] == "ready"
    metrics = (await browse.get(f"{house.http}/metrics")).text
    assert 'sampan_requests_total{door="completions",outcome="stop"} 1.0' in metrics
    assert "sampan_engine_ready 1.0" in metrics


async def test_bytes_that_are_not_http_are_answered_in_json(serve):
    """TLS to a plain port, an endless head: a reply, and the connection ends."""
    house = await serve()
    for sent, status in (
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 300_000, 431),
    ):
        peer = await house.connection()
        peer.send(sent)
        await peer.read_head()
        assert peer.status == status
        assert "application/json" in peer.head
