# SPDX-License-Identifier: Apache-2.0
"""Which websites may open a door from a visitor's browser.

Owns the reading and comparing of origins. Invariant: an origin is allowed by exact scheme, host and port,
never by a part of its text, and two ways to write one origin compare equal. Browsers apply no same-origin
rule to WebSocket handshakes, so this check is the only one; it must never be skipped before an accept, and
must never allow everything unless the list says so.

A client without an Origin header is no browser (wscat, an SDK, a bot), so the rule has nothing to protect
there and lets it pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
ANY = "*"

Origin = tuple[str, str, int]
"""Scheme, host in lower case and ASCII, port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginPolicy:
    """The allowed origins. `is_any_allowed` is the explicit `"*"` of the settings."""

    allowed: frozenset[Origin] = frozenset()
    is_any_allowed: bool = False

    @classmethod
    def parse(cls, entries: Iterable[str]) -> "OriginPolicy":
        """Read a list such as `["https://shop.example", "http://localhost:3000"]`, or `["*"]`.

        Raises:
            ValueError: an entry that is no origin; the message names it and shows the form.
        """
        allowed: set[Origin] = set()
        is_any_allowed = False
        for entry in entries:
            if entry.strip() == ANY:
                is_any_allowed = True
                continue
            origin = parse_origin(entry)
            if origin is None:
                raise ValueError(
                    f"{entry!r} is not an origin: write it like https://shop.example or http://host:8080"
                )
            allowed.add(origin)
        return cls(allowed=frozenset(allowed), is_any_allowed=is_any_allowed)

    def allows(self, origins: Sequence[str], *, hosts: Sequence[str], scheme: str) -> bool:
        """Whether a request may pass, by all its Origin headers, all its Host headers and its own scheme.

        None passes, more than one never does. A page that this server itself sent (its origin's host and
        port are the Host header's) passes too; an `https` page does so even when TLS ends in front of us
        and we see plain `http` or `ws`, a plain page never does over TLS.
        """
        if not origins:
            return True
        if len(origins) > 1:
            return False
        return self.is_listed(origins[0]) or _is_same(parse_origin(origins[0]), hosts, scheme)

    def is_listed(self, text: str) -> bool:
        """Whether the list itself names this origin: what cross-origin replies may be shown to."""
        return self.is_any_allowed or parse_origin(text) in self.allowed


def parse_origin(text: str) -> Origin | None:
    """Read an origin as browsers send it, or None: `null`, a path, a user name, a bad port or host."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        return None
    scheme = parts.scheme.lower()
    has_more = parts.path or parts.query or parts.fragment or "@" in parts.netloc or "?" in text or "#" in text
    host = _ascii_host(parts.hostname or "")
    if scheme not in DEFAULT_PORTS or has_more or host is None or parts.netloc.endswith(":"):
        return None
    return scheme, host, DEFAULT_PORTS[scheme] if port is None else port


def _ascii_host(host: str) -> str | None:
    """Spell a host name as browsers do: punycode, lower case. None when it cannot be one."""
    if ":" in host:
        return host.lower()
    try:
        spelled = host.encode("idna").decode("ascii").lower() if host else ""
    except UnicodeError:
        return None
    is_name = spelled != "" and all(letter.isalnum() or letter in "-._" for letter in spelled)
    return spelled if is_name else None


def _is_same(origin: Origin | None, hosts: Sequence[str], scheme: str) -> bool:
    """Whether an origin is the very server that is asked."""
    if origin is None or len(hosts) != 1:
        return False
    is_secure = scheme in ("https", "wss")
    if is_secure and origin[0] != "https":
        return False
    # The Host header leaves out the default port of the scheme the browser used, which the origin names.
    return parse_origin(f"{origin[0]}://{hosts[0]}") == origin
