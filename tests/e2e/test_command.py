# SPDX-License-Identifier: Apache-2.0
"""The command as people use it: at a terminal, through pipes, and when something is wrong."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import zipfile

import httpx
import pytest
import websockets
from websockets.sync.client import connect

from server.core.config import load_config
from server.gateway.http.assets import read_assets
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

WAIT_S = 60


class Person:
    """Somebody at a terminal: types, reads, presses Ctrl-C."""

    def __init__(self, *words, home):
        environ = {**os.environ, "SAMPAN_HOME": str(home), "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(home)
            os.execve(sys.executable, [sys.executable, "-m", "server", *words], environ)
        self.seen = ""

    def reads(self, pattern):
        """Wait until the terminal shows it; what stood before is read."""
        ends_at = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < ends_at, self.seen
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.seen += os.read(self.terminal, 4096).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found.group()

    def types(self, text):
        os.write(self.terminal, text.encode())

    def leaves(self):
        """The exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def person(tmp_path):
    """Sit down at terminals with one home; each program that still runs at the end is ended."""
    people = []

    def sit_down(*words):
        people.append(Person(*words, home=tmp_path))
        return people[-1]

    yield sit_down
    for each in people:
        os.close(each.terminal)


def test_a_conversation_at_a_terminal(server_process, person):
    """Answers stream; Ctrl-C stops the answer and not the program; --resume brings everything back."""
    one = person("chat", "--url", server_process.url, "--temperature", "0")
    one.reads("/help for help")
    one.reads("> ")
    one.types("What is the capital of France?\n")
    one.reads("Paris")
    one.reads("> ")
    one.types("Write a very long story about the sea.\n")
    one.reads(r"story about the sea\.\s+\w+ \w+")
    one.types("\x03")
    one.reads(r"\(stopped\)")
    one.reads("> ")
    one.types("/exit\n")
    assert one.leaves() == 0
    again = person("chat", "--url", server_process.url, "--resume")
    again.reads("4 messages brought back")
    again.reads("> ")
    again.types("\x04")
    assert again.leaves() == 0


def run(*words, cwd, stdin="", **environ):
    command = [sys.executable, "-m", "server", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SAMPAN_HOME": str(cwd), **environ}
    return subprocess.run(command, input=stdin, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_a_pipe_gets_the_answer_alone(server_process, tmp_path):
    """What is piped in is the question, standard output is the answer, and a second time it is the same."""
    words = ("chat", "--url", server_process.url, "--seed", "7", "--max-tokens", "24")
    one, again = (run(*words, cwd=tmp_path, stdin="Say hi.") for _ in range(2))
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout.strip()
    assert one.stdout == again.stdout


def test_a_taken_port_is_one_clear_line(server_process, sampan_home, tmp_path):
    """Starting beside a running server says what is wrong; it leaves no process and no trace of Python."""
    words = ("serve", "--port", str(server_process.port), "--engine.home", str(sampan_home))
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "another program listens there" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_wrong_settings_fetch_and_open_nothing(tmp_path):
    """Every fault is told at once, with its source, before a model is looked for."""
    (tmp_path / "sampan.toml").write_text("[server]\nport = 'x'\n[engine]\nmax_num_seq = 3\n")
    done = run("serve", cwd=tmp_path, SAMPAN_LOG__FORMAT="xml")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["sampan.toml"]


def test_a_listing_can_be_served(tmp_path):
    """What `sampan config` prints is a settings file that gives the same settings."""
    text = run("config", "--port", "9", cwd=tmp_path).stdout
    (tmp_path / "printed.toml").write_text(text)
    assert load_config(environ={}, file=tmp_path / "printed.toml").server.port == 9


def test_an_interrupted_server_ends_well(start_server, smollm2):
    """Ctrl-C ends it with 0; its engine goes with it."""
    smollm2()
    server = start_server("--engine.max-num-seqs", "1")
    assert server.stop(signal.SIGINT) == 0
    assert "Traceback" not in server.log_text()


def test_no_secret_and_no_text_in_the_log(start_server, smollm2):
    """No credential, wherever it came in, and nothing people wrote is in the loudest log or in the metrics."""
    smollm2()
    server = start_server("--engine.max-num-seqs", "1", "--log.level", "debug")
    headers = {"Authorization": "Bearer SECRET2", "Cookie": "a=SECRET5", "X-Api-Key": "SECRET6"}
    replies = []
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "SECRET4 hello"}], "max_tokens": 4}
        replies += [
            client.post("/v1/chat/completions?ticket=SECRET1", json=body),
            client.post("/v1/chat/completions?ticket=SECRET1", content=b'{"messages": "SECRET4"'),
            client.post("/v1/chat/completions", json={**body, "model": 3, "user": "SECRET4"}),
            client.get("/nothing?ticket=SECRET1"),
        ]
    url = f"{server.ws_url}/v1/realtime?ticket=SECRET1"
    offered = ["realtime", "openai-insecure-api-key.SECRET3"]
    with connect(url, additional_headers=headers, subprotocols=offered) as ws:
        ws.recv()
        ws.send('{"type": "SECRET4"}')
        ws.send("SECRET4")
        ws.recv()
        ws.recv()
    with pytest.raises(websockets.InvalidStatus):
        connect(f"{server.ws_url}/nothing?ticket=SECRET1", additional_headers=headers)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert server.stop() == 0
    assert "socket_opened" in server.log_text()
    for number in "12356":
        for text in (server.log_text(), metrics, *(reply.text for reply in replies)):
            assert f"SECRET{number}" not in text
    assert "SECRET4" not in server.log_text() + metrics


def test_an_installed_wheel_has_all_it_needs(tmp_path):
    """The wheel carries the page and the command: an installation serves what a checkout serves."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from server.cli import main; from server.gateway.http.assets import read_assets, static_folder;"
        "print(sorted(read_assets(static_folder()))); raise SystemExit(main(['--version']))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == str(sorted(read_assets(ROOT / "static")))
    assert "server.cli:main" in (next((tmp_path / "site").glob("*.dist-info")) / "entry_points.txt").read_text()
