# SPDX-License-Identifier: Apache-2.0
"""The ports: who stands behind them offers every method, called the same way."""

import inspect

import pytest

from server.core.ports import Generator, GeneratorStatus
from server.engine.engine import Engine
from tests.fakes import FakeGenerator


def methods_of(kind):
    return {name: each for name, each in vars(kind).items() if inspect.isfunction(each) and name[0] != "_"}


@pytest.mark.parametrize("kind", [Engine, FakeGenerator])
def test_generators_fit_the_port(kind):
    """The engine and the tests' fake have the port's methods, with the same parameters."""
    for name, method in methods_of(Generator).items():
        own = getattr(kind, name)
        assert list(inspect.signature(own).parameters) == list(inspect.signature(method).parameters), name
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(method), name


def test_an_unknown_status_is_idle():
    """A status that says only whether it is ready counts nothing."""
    status = GeneratorStatus(is_ready=True)
    assert (status.reason, status.num_running, status.num_waiting, status.num_waiting_tokens) == ("", 0, 0, 0)
