# SPDX-License-Identifier: Apache-2.0
"""The one table of errors: no blank cell, no code outside it."""

import ast
import copy
import pickle
from pathlib import Path

import pytest

import server
from server.core import errors
from server.core.errors import CODES, Bug, ClientFault, Close, LogLevel, Overloaded, Unavailable, error_of

KINDS = {429: Overloaded, 503: Unavailable, 500: Bug}


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_whole(code):
    """Each code has a status, a type and a log level; its class and whether to retry follow from the status."""
    row = CODES[code]
    error = error_of(code, "words", param="x", retry_after_ms=5)
    assert 400 <= row.http_status < 600
    assert row.type.endswith("_error")
    assert isinstance(row.log_level, LogLevel)
    assert type(error) is KINDS.get(row.http_status, ClientFault)
    assert error.is_retryable == (row.http_status in KINDS)


def test_a_client_mistake_is_no_alarm():
    """Only what is our fault is an error in the log."""
    loud = {code for code, row in CODES.items() if row.log_level is LogLevel.ERROR}
    assert all(CODES[code].http_status in (500, 503) for code in loud)


def test_an_unknown_code_is_our_mistake():
    """No door invents a code."""
    with pytest.raises(KeyError):
        error_of("surprise", "words")


def test_no_code_outside_the_table():
    """Every code that the server spells has its row."""
    used = set()
    for path in Path(server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "error_of" and node.args
            if is_call and isinstance(node.args[0], ast.Constant):
                used.add(node.args[0].value)
    assert used
    assert used <= set(CODES)


@pytest.mark.parametrize("twin_of", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_crosses_processes_whole(twin_of):
    """Copied or pickled, an error keeps its class and every part."""
    error = error_of("queue_full", "busy", param="p", retry_after_ms=7)
    twin = twin_of(error)
    assert (type(twin), str(twin)) == (Overloaded, "busy")
    assert (twin.code, twin.param, twin.retry_after_ms) == ("queue_full", "p", 7)


def test_close_codes_are_legal():
    """Every close uses a code that an endpoint may send, and its reason fits the frame."""
    closes = [value for value in vars(errors).values() if isinstance(value, Close)]
    assert closes
    for close in closes:
        assert close.code in (1000, 1003, 1011, 1012, 1013) or 4000 <= close.code <= 4999
        assert len(close.reason.encode()) <= 123
