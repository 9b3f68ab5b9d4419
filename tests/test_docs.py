# SPDX-License-Identifier: Apache-2.0
"""What is written for people: equal in its languages, without dead links, generated where it can be."""

import itertools
import re
import tomllib
from urllib.parse import unquote

import pytest

import server
from server.core.config import describe, load_config
from tests.test_architecture import ROOT, name_of, tracked

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
KIND = re.compile(r"#+ |- |!\[|\| ")
PAIRS = [(path, path.with_name(f"{path.stem}.zh-Hans.md")) for path in (ROOT / "README.md",)]


def blocks_of(path):
    """Every code block as (language, code)."""
    return FENCE.findall(path.read_text())


def prose_of(path):
    """The text without its code blocks."""
    return FENCE.sub("", path.read_text())


def shape_of(path):
    """Its lines as levels of headings, paragraphs, items, pictures and rows, in order."""
    lines = [line for line in prose_of(path).splitlines() if line.strip()]
    return [found.group() if (found := KIND.match(line)) else "text" for line in lines]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda path: path.name)
def test_languages_are_equal(one, other):
    """Both languages have the same headings, paragraphs and lists in the same order, and the same code."""
    assert shape_of(one) == shape_of(other)
    assert blocks_of(one) == blocks_of(other)


def anchors_of(path):
    """What a link may name after `#`: each heading in lower case, its words joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose_of(path), re.MULTILINE) if path.suffix == ".md" else []
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def links():
    for path in tracked():
        if path.suffix == ".md":
            yield from ((path, link) for link in LINK.findall(prose_of(path)))


def test_no_link_is_dead():
    """Every relative link leads to a file of the repository, and to a heading that it has."""
    dead = []
    for path, link in links():
        target, _, anchor = unquote(link).partition("#")
        if "://" in target:
            continue
        file = (path.parent / target) if target else path
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            dead.append(f"{name_of(path)}: {link}")
    assert [] == dead


def test_the_first_lines_are_the_two_commands():
    """Who opens the README sees how to run and how to test before anything else."""
    for path in itertools.chain(*PAIRS):
        words = [line.split()[1:3] for line in path.read_text().splitlines()[1:3]]
        assert words == [["make", "run"], ["make", "test"]]


def test_generated_files_are_fresh():
    """The reference and the example are what `sampan config docs` and `example` print."""
    assert (ROOT / "deploy/config.md").read_text() == describe.reference()
    assert (ROOT / "deploy/config.example.toml").read_text() == describe.example()


def test_example_settings_are_good(tmp_path):
    """Every TOML block of the README is accepted by the server, whole."""
    texts = [code for language, code in blocks_of(ROOT / "README.md") if language == "toml"]
    assert texts
    for text in texts:
        file = tmp_path / "sampan.toml"
        file.write_text(text)
        assert len(load_config(environ={}, file=file).sources) == sum(map(len, tomllib.loads(text).values()))


def test_the_changelog_knows_this_version():
    """The version that is shipped has its part of the changelog, below what is unreleased."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert headings[1].startswith(server.__version__)
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == server.__version__
