# SPDX-License-Identifier: Apache-2.0
"""Commands and events: two closed unions of frozen values."""

import dataclasses
import inspect
import typing

from server.core import events
from server.core.types import SamplingParams


def own_classes():
    classes = [kind for _, kind in inspect.getmembers(events, inspect.isclass)]
    return {kind for kind in classes if kind.__module__ == events.__name__}


def test_the_unions_are_closed():
    """Each class is a command, an event, or a value inside one; none is both."""
    commands, sent = set(typing.get_args(events.Command)), set(typing.get_args(events.Event))
    assert not commands & sent
    assert own_classes() == commands | sent | {events.SessionSettings, events.SettingsPatch}


def test_everything_is_frozen_and_by_name():
    """A value may cross tasks without a lock, and is built by the names of its fields."""
    for kind in own_classes():
        params = kind.__dataclass_params__
        assert params.frozen, kind
        assert all(field.kw_only for field in dataclasses.fields(kind)), kind
        assert not hasattr(kind(**{f.name: None for f in dataclasses.fields(kind)}), "__dict__"), kind


def test_every_command_can_be_answered():
    """Each command carries the client's event_id, so that a Failed can name it."""
    for kind in typing.get_args(events.Command):
        assert {field.name: field.default for field in dataclasses.fields(kind)}["event_id"] is None


def test_settings_start_from_the_defaults():
    """Two sessions' default settings are equal and start from the sampling defaults."""
    assert events.SessionSettings(model="m").sampling == SamplingParams()
