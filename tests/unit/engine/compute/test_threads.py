# SPDX-License-Identifier: Apache-2.0
"""The size of the pool under every kind of CPU limit."""

import pytest

from server.engine.compute.threads import plan_threads


def check(tmp_path, files, *, num_allowed=16, asked=0):
    """Plan on a machine whose /proc and /sys hold these files."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    plan = plan_threads(asked=asked, num_allowed=num_allowed, root=tmp_path)
    return plan.num_threads, plan.can_spin


V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "9:memory:/m\n4:cpu,cpuacct:/docker/x\n"}


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("200000 100000\n", (2, False)),
        ("50000 100000\n", (1, False)),
        ("150000 100000\n", (1, False)),
        ("399000 100000\n", (2, True)),
        ("400000 100000\n", (3, True)),
        ("max 100000\n", (15, True)),
        ("nonsense", (15, True)),
        ("100000 0\n", (15, True)),
    ],
)
def test_a_quota_binds(tmp_path, cpu_max, expected):
    """Whole CPUs of the quota compute, waiting busily only where one is left over."""
    assert check(tmp_path, {**V2, "sys/fs/cgroup/a/b/cpu.max": cpu_max}) == expected


def test_the_tightest_group_above_binds(tmp_path):
    """A quota of a parent group holds for its children, and in a container only the top is visible."""
    files = {**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "200000 100000"}
    assert check(tmp_path, files) == (2, False)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "expected"), [("200000", (2, False)), ("-1", (15, True))])
def test_the_older_cgroups_bind_too(tmp_path, mount, quota, expected):
    """Version 1 spells the quota in two files, under either name of its mount."""
    folder = f"sys/fs/cgroup/{mount}/docker"
    files = {**V1, f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    assert check(tmp_path, files) == expected


@pytest.mark.parametrize(("num_allowed", "num_threads"), [(1, 1), (2, 2), (3, 2), (8, 7)])
def test_allowed_cpus_bind(tmp_path, num_allowed, num_threads):
    """Up to two CPUs all compute; from three on, one is the gateway's."""
    assert check(tmp_path, {}, num_allowed=num_allowed) == (num_threads, True)


def test_the_operator_has_the_last_word(tmp_path):
    """A configured number stands, and a quota it fills still forbids busy waiting."""
    assert check(tmp_path, {**V2, "sys/fs/cgroup/cpu.max": "200000 100000"}, asked=5) == (5, False)


def test_this_machine_has_an_answer():
    """Wherever this runs, there is at least one thread and a reason in words."""
    plan = plan_threads()
    assert plan.num_threads >= 1
    assert plan.reason
