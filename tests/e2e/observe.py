# SPDX-License-Identifier: Apache-2.0
"""What a process holds, read from outside: its metrics, files, memory, children and sockets."""

import re
import time
from pathlib import Path

import httpx
import pytest


def metric(server, name, **labels):
    """One sample of `/metrics`; 0 when there is none yet."""
    wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    line = f"{name}{{{wanted}}}" if wanted else name
    for each in httpx.get(f"{server.url}/metrics").text.splitlines():
        if each.startswith(f"{line} "):
            return float(each.rpartition(" ")[2])
    return 0.0


def num_files(pid):
    """Open files of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_mib(pid):
    """Memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1024**2


def engine_pid(server):
    """The engine that a server started."""
    for child in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if b"engine" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    pytest.fail("there is no engine")


def wait_until(is_so, seconds=20.0):
    """Wait for something that is seen only from outside."""
    ends_at = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > ends_at:
            pytest.fail("it did not come")
        time.sleep(0.02)


def inet_addresses(pid):
    """Local and remote addresses of every TCP and UDP socket that a process holds, as the kernel's hex."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        found = re.fullmatch(r"socket:\[(\d+)\]", _target(link))
        inodes |= {found[1]} if found else set()
    addresses = []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                addresses.append((table, fields[1], fields[2]))
    return addresses


def _target(link):
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""
