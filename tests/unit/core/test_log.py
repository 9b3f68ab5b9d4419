# SPDX-License-Identifier: Apache-2.0
"""The log: events and fields in two forms, and nothing that must not be there."""

import io
import json
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core import log
from server.core.errors import error_of

SECRETS = ["SECRETvalue1", "s3cr3t-VALUE_2", "eyJhbGciOi.J9"]


@pytest.fixture
def written():
    """A logger whose lines are kept: `logger, lines()`; logging is as before when the test ends."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()

    def start(form="json", level="debug"):
        log.configure(level, form, stream)
        return logging.getLogger("server.test"), lambda: stream.getvalue().splitlines()

    yield start
    root.handlers[:] = handlers
    root.setLevel(level)


def line_of(form, event, exc_info=None, **fields):
    """One formatted record."""
    record = logging.LogRecord("server.x", logging.INFO, "x.py", 1, event, (), exc_info)
    vars(record).update(fields)
    return (log.JsonLines() if form == "json" else log.TextLines()).format(record)


def test_json_lines(written):
    """A line is one object: time, level, logger, event and the fields."""
    logger, lines = written("json")
    logger.warning("socket_closed", extra={"code": 1000, "session_id": "sess_1", "is_slow": False})
    (line,) = lines()
    value = json.loads(line)
    assert value.pop("time").endswith("Z")
    assert value == {
        "level": "warning", "logger": "server.test", "event": "socket_closed",
        "code": 1000, "session_id": "sess_1", "is_slow": False,
    }  # fmt: skip


def test_text_lines(written):
    """A line reads from left to right; a value that needs quotes has them."""
    logger, lines = written("text")
    logger.info("listening", extra={"address": "http://127.0.0.1:8000", "note": 'a "b"\nc'})
    (line,) = lines()
    assert line.endswith('INFO    listening address=http://127.0.0.1:8000 note="a \\"b\\"\\nc"')


def test_levels(written):
    """What is below the level is not written, and configuring again replaces the handler."""
    written("text", "debug")
    logger, lines = written("text", "error")
    logger.warning("quiet")
    logger.error("loud")
    assert [line.split()[-1] for line in lines()] == ["loud"]


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer {}", "authorization={}", "'authorization': 'Basic {}'", "Bearer {}",
        "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.{}, x", "Cookie: a={}; b={}",
        "GET /v1/realtime?ticket={} HTTP/1.1", "wss://h.example/chat?a=1&token={}#x", "/chat?q={}", "/chat?{}",
        "?api_key={}", "ticket={}", "bearer  {}", "wss://h.example?x={}", "GET /a?b={}&c={} done",
        "redis://:{}@h:1/0", "redis://user:{}@h", '{{"api_key": "{}"}}', "resume_token: {}", "password={}",
        "sk-{}", "Proxy-Authorization: {}", "https://u:{}@h.example/x?y={}", "X-Api-Key: {}",
    ],
)  # fmt: skip
def test_no_secret_in_a_text(form, secret, text):
    """Whatever carries it into an event or a field, a credential becomes a hash."""
    text = text.format(secret, secret)
    for line in (line_of(form, text), line_of(form, "e", note=text), line_of(form, "e", many=[{"x": text}])):
        assert secret not in line
        assert "#" in line


@pytest.mark.parametrize(
    "name",
    ["authorization", "api_key", "apiKey", "ticket", "token", "resume_token", "X-Api-Key", "cookie", "password",
     "client_secret", "subprotocols", "credentials", "auth_token"],
)  # fmt: skip
def test_no_secret_under_its_name(name):
    """A field that is named like a secret is hidden, at any depth and of any kind."""
    for value in ("SECRET1", ["SECRET1"], {"x": "SECRET1"}, 1234567):
        line = line_of("json", "e", **{name: value}, headers={name: value})
        assert "SECRET1" not in line
        assert "1234567" not in line


@pytest.mark.parametrize("name", ["input_tokens", "num_tokens", "max_tokens", "keyboard", "basic"])
def test_plain_fields_stay(name):
    """Counts of tokens are no secrets."""
    assert json.loads(line_of("json", "e", **{name: 12}))[name] == 12


def test_lines_about_one_secret_can_be_found():
    """The same secret has the same hash, another one another, and a hash is not hashed again."""
    one, again, other = (log.redact(f"ticket={value}") for value in ("abc", "abc", "abd"))
    assert one == again != other
    assert log.redact(one) == one


def test_an_exception_without_its_text():
    """Where it happened and what kind it was; the words only where they are ours or the system's."""
    try:
        try:
            int("what the user wrote")
        except ValueError as error:
            raise KeyError("what the user said") from error
    except KeyError as error:
        value = json.loads(line_of("json", "turn_failed", (type(error), error, error.__traceback__)))
    assert value["error"] == "KeyError <- ValueError"
    assert value["at"][-1].startswith("unit/core/test_log.py:")
    assert log.describe(FileNotFoundError(2, "No such file", "a")).startswith("FileNotFoundError: [Errno 2]")
    assert log.describe(error_of("queue_full", "busy")) == "Overloaded: busy"
    assert "user" not in log.describe(RuntimeError("user"))


def test_a_library_cannot_break_a_line():
    """A message whose arguments do not fit, a NUL, an escape or a line break still gives one clean line."""
    record = logging.LogRecord("lib", logging.INFO, "x.py", 1, "a %s %s\nb\x1b[31m\0", ("one",), None)
    for form in (log.JsonLines(), log.TextLines()):
        line = form.format(record)
        assert line.isprintable()


@given(st.text(), st.dictionaries(st.sampled_from(["a", "b"]), st.recursive(
    st.none() | st.integers() | st.floats() | st.text() | st.binary(), st.lists, max_leaves=8)))  # fmt: skip
def test_one_line_for_anything(event, fields):
    """Any values give exactly one line in either form, and the JSON one can be read."""
    assert "\n" not in line_of("text", event.replace("%", "%%"), **fields)
    line = line_of("json", event.replace("%", "%%"), **fields)
    assert "\n" not in line
    json.loads(line)


@pytest.mark.parametrize("char", ["x", "/", "?", "=", "a_", "sk-", "token", "://", "@", "Bearer "])
def test_redacting_takes_no_time(char):
    """No text makes the patterns slow: a line takes milliseconds, whatever a client sends."""
    started = time.perf_counter()
    for _ in range(10):
        log.redact(char * 1_000_000)
    assert time.perf_counter() - started < 1


def test_values_are_bounded():
    """A long value is cut: a client can't fill the disk with one line."""
    assert len(line_of("text", "e", note="x" * 100_000)) < 2 * log.VALUE_CHARS_MAX
    assert len(line_of("json", "x" * 100_000)) < 2 * log.VALUE_CHARS_MAX


def test_a_broken_stream_ends_nothing(written, capsys):
    """A line that can't be written is dropped in silence: no traceback, and no record on stderr."""
    logger, _ = written("text")
    handler = logging.getLogger().handlers[0]
    handler.stream.close()
    logger.error("lost", extra={"ticket": "SECRET"})
    assert capsys.readouterr() == ("", "")
