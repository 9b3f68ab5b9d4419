# SPDX-License-Identifier: Apache-2.0
"""The catalogue's own consistency."""

import re

import pytest

from server.models.package import package_path
from server.models.source.catalogue import CATALOGUE
from server.models.source.hub import Address


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE)
def test_every_entry_can_be_asked_for(entry, tmp_path):
    """A name is a model id, a hub's address is one, and a pinned wheel is pinned whole."""
    assert package_path(tmp_path, entry.model_id, "w8a8")
    assert entry.model_id == entry.model_id.lower()
    assert Address.of(entry.hub) == Address(repository=entry.hub, revision="main", file=None)
    assert entry.title
    assert entry.license
    assert entry.languages
    if entry.wheel:
        assert entry.wheel.wheel_size > 0
        for digest in (entry.wheel.wheel_sha256, entry.wheel.member_sha256):
            assert re.fullmatch("[0-9a-f]{64}", digest)
        assert entry.wheel.member.endswith(".gguf")


def test_the_default_model_comes_first():
    """The first entry is the one that a fresh machine gets, and needs no hub."""
    first = next(iter(CATALOGUE.values()))
    assert first.model_id == "smollm2-135m-instruct"
    assert first.wheel is not None
