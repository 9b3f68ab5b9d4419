# SPDX-License-Identifier: Apache-2.0
"""Who shares a place in the queue while nobody has a name.

Invariant: the answer depends on the caller's address alone, which the listener has already resolved through
the trusted proxies. It must never believe a header.
"""

import ipaddress

IPV6_PREFIX = 64
"""One IPv6 user holds a whole /64, and could call from another address of it each time."""


def tenant_of(client: tuple[str, int] | None) -> str:
    """The address of a caller, or its /64; empty when there is none, as on a unix socket without a proxy."""
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
    return str(address)
