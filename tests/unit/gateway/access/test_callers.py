# SPDX-License-Identifier: Apache-2.0
"""Who shares a place in the queue is decided by the address alone."""

import pytest

from server.gateway.access.callers import tenant_of


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (None, ""),
        (("", 0), ""),
        (("testclient", 50000), ""),
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 1), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
    ],
)
def test_an_address_is_one_caller_and_so_is_a_whole_ipv6_subnet(client, expected):
    """One IPv6 user can't pass for many."""
    assert tenant_of(client) == expected
