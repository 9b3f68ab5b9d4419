# SPDX-License-Identifier: Apache-2.0
"""An origin passes by exact scheme, host and port, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateway.access.origins import OriginPolicy, parse_origin

SHOP = OriginPolicy.parse(["https://shop.example", "http://dev.example:3000", "https://bücher.example"])


def check(policy, origins, expected, *, host="chat.example", scheme="ws"):
    assert policy.allows(origins, hosts=[host], scheme=scheme) is expected


@pytest.mark.parametrize(
    "origin",
    [
        "https://shop.example",
        "https://shop.example:443",
        "https://SHOP.example",
        "HTTPS://shop.example",
        "http://dev.example:3000",
        "https://xn--bcher-kva.example",
        "https://bücher.example",
    ],
)
def test_listed_origins_pass_in_every_spelling_of_the_same_origin(origin):
    """Letter case, a default port written out and punycode change nothing."""
    check(SHOP, [origin], True)


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "*",
        "https://evil.example",
        "http://shop.example",
        "https://shop.example:8443",
        "https://shop.example.evil.example",
        "https://evil-shop.example",
        "https://sub.shop.example",
        "https://shop.example/",
        "https://shop.example?x",
        "https://shop.example#",
        "https://user@shop.example",
        "https://shop.example:",
        "https://shop.example:99999",
        "https://shop.example:x",
        "http://dev.example",
        "file://",
        "chrome-extension://shop.example",
        "https://",
        "shop.example",
        "https://[::1",
        "https://a b",
        "https://shop.example, https://evil.example",
        "https://shop.example\x00",
    ],
)
def test_everything_else_is_refused(origin):
    """A near miss is a miss."""
    check(SHOP, [origin], False)


def test_no_origin_is_no_browser():
    """An SDK or wscat sends none and passes; two of them is nobody's browser."""
    check(SHOP, [], True)
    check(SHOP, ["https://shop.example", "https://shop.example"], False)


@pytest.mark.parametrize(
    ("origin", "host", "scheme", "expected"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "ws", True),
        ("http://localhost:8000", "LOCALHOST:8000", "http", True),
        ("http://localhost:8000", "127.0.0.1:8000", "ws", False),
        ("https://chat.example", "chat.example", "ws", True),
        ("https://chat.example", "chat.example:443", "wss", True),
        ("http://chat.example", "chat.example", "wss", False),
        ("https://chat.example:8443", "chat.example", "wss", False),
        ("http://[::1]:8000", "[::1]:8000", "ws", True),
        ("http://chat.example", "chat.example/x", "ws", False),
        ("http://evil.example", "chat.example", "ws", False),
    ],
)
def test_the_server_s_own_page_passes(origin, host, scheme, expected):
    """Same host and port as the Host header, and never a plain page to a TLS door."""
    check(OriginPolicy(), [origin], expected, host=host, scheme=scheme)


def test_own_page_needs_exactly_one_host():
    """Two Host headers, or none, make nobody the same."""
    assert not OriginPolicy().allows(["http://a.example"], hosts=["a.example", "a.example"], scheme="ws")
    assert not OriginPolicy().allows(["http://a.example"], hosts=[], scheme="ws")


def test_any_is_explicit():
    """Only the star itself allows all."""
    assert OriginPolicy.parse(["*"]).is_any_allowed
    check(OriginPolicy.parse(["*"]), ["https://evil.example"], True)
    assert not OriginPolicy.parse([]).is_any_allowed


@pytest.mark.parametrize(
    "entry", ["shop.example", "https://*.example", "https://shop.example/path", "null", ""]
)
def test_a_bad_entry_is_named(entry):
    """A setting that could never match is refused with its own text."""
    with pytest.raises(ValueError, match="is not an origin"):
        OriginPolicy.parse([entry])


@given(st.text(max_size=60))
def test_reading_never_raises(text):
    """Whatever a header holds, the answer is an origin or None."""
    origin = parse_origin(text)
    assert (
        origin is None
        or parse_origin(f"{origin[0]}://{origin[1] if ':' not in origin[1] else f'[{origin[1]}]'}:{origin[2]}")
        == origin
    )
