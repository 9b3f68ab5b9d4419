# SPDX-License-Identifier: Apache-2.0
"""One file over HTTP: gone on with where it was cut, right or not there at all, secrets kept."""

import hashlib
import urllib.request

import pytest

from server.models.source import download
from server.models.source.download import ATTEMPTS, Client, RemoteFile
from server.models.source.files import Checksum, SourceError
from tests.data.hub_server import COMMIT, HubServer, cut, shifted, status, whole

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """How long each pause would have been; none is made."""
    made = []
    monkeypatch.setattr(download.time, "sleep", made.append)
    return made


@pytest.fixture
def hub():
    with HubServer() as server:
        server.add("o/r", {"f.bin": DATA})
        yield server


SIZE = len(DATA)


def remote(hub, size=SIZE, data=DATA):
    return RemoteFile(
        url=f"{hub.url}/o/r/resolve/{COMMIT}/f.bin",
        size=size,
        checksum=Checksum(sha256=hashlib.sha256(data).hexdigest()),
    )


def fetch(hub, folder, **changes):
    reports = []
    Client(hub.url, None).fetch(
        remote(hub, **changes), folder / "f.bin", lambda *report: reports.append(report)
    )
    return reports


def ranges(hub):
    return [headers.get("Range") for _, headers in hub.requests]


def test_a_file_comes_whole(hub, tmp_path):
    """The file is there under its name, nothing is left beside it, and progress was told in bytes."""
    reports = fetch(hub, tmp_path)
    assert (tmp_path / "f.bin").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["f.bin"]
    assert reports[-1] == ("fetch f.bin", len(DATA), len(DATA))


def test_a_file_that_is_there_is_not_fetched_again(hub, tmp_path):
    """A second fetch asks for nothing."""
    fetch(hub, tmp_path)
    fetch(hub, tmp_path)
    assert len(hub.requests) == 1


def test_an_empty_file_is_a_file(hub, tmp_path):
    """Nothing to fetch is fetched."""
    fetch(hub, tmp_path, size=0, data=b"")
    assert (tmp_path / "f.bin").read_bytes() == b""


def test_a_cut_connection_is_gone_on_with(hub, tmp_path, pauses):
    """Each attempt starts at the first byte that is missing; attempts that bring bytes cost no patience."""
    hub.faults["f.bin"] = [cut(1000)] * 7
    fetch(hub, tmp_path)
    assert ranges(hub) == [None, *[f"bytes={count * 1000}-" for count in range(1, 8)]]
    assert (tmp_path / "f.bin").read_bytes() == DATA
    assert pauses == []


def test_a_later_start_goes_on_too(hub, tmp_path):
    """What an interrupted process left is not fetched again."""
    (tmp_path / "f.bin.partial").write_bytes(DATA[:5000])
    fetch(hub, tmp_path)
    assert ranges(hub) == ["bytes=5000-"]
    assert (tmp_path / "f.bin").read_bytes() == DATA


def test_a_host_without_ranges_is_asked_from_the_start(hub, tmp_path):
    """A whole answer to a range replaces what was there instead of following it."""
    (tmp_path / "f.bin.partial").write_bytes(b"x" * 5000)
    hub.faults["f.bin"] = [whole()]
    fetch(hub, tmp_path)
    assert (tmp_path / "f.bin").read_bytes() == DATA


def test_another_range_than_asked_for_is_not_written(hub, tmp_path):
    """An answer that starts elsewhere is dropped and asked for again."""
    hub.faults["f.bin"] = [cut(1000), shifted()]
    fetch(hub, tmp_path)
    assert (tmp_path / "f.bin").read_bytes() == DATA


def test_passing_faults_are_outlived_with_growing_pauses(hub, tmp_path, pauses):
    """Server faults and a full house are tried again, slower each time and never faster than asked."""
    hub.faults["f.bin"] = [status(503), status(500), status(429, Retry_After="7"), status(416)]
    fetch(hub, tmp_path)
    assert pauses == [0.5, 1, 7, 4]
    assert (tmp_path / "f.bin").read_bytes() == DATA


def test_patience_ends_and_keeps_what_came(hub, tmp_path, pauses):
    """After some attempts without a byte it gives up with the reason; the next start goes on."""
    hub.faults["f.bin"] = [cut(1000), *[cut(0)] * ATTEMPTS]
    with pytest.raises(
        SourceError, match="cannot be had, 5 times: the connection was closed too early; start again"
    ):
        fetch(hub, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["f.bin.partial"]
    fetch(hub, tmp_path)
    assert ranges(hub)[-1] == "bytes=1000-"


def test_a_host_that_always_starts_over_is_given_up(hub, tmp_path):
    """Bytes that came before are no progress: there is no endless loop."""
    hub.faults["f.bin"] = [cut(900), *[whole() | cut(count) for count in (800, 700, 900, 100, 5)]]
    with pytest.raises(SourceError, match="5 times"):
        fetch(hub, tmp_path)


@pytest.mark.parametrize(
    ("code", "hint"),
    [(401, "set HF_TOKEN"), (403, "accept its terms"), (404, "check the name"), (410, "try again later")],
)
def test_a_refusal_is_final_and_says_what_to_do(hub, tmp_path, code, hint):
    """What will not change by itself is not tried again."""
    hub.faults["f.bin"] = [status(code)]
    with pytest.raises(SourceError, match=f"answer {code}: .*{hint}"):
        fetch(hub, tmp_path)
    assert len(hub.requests) == 1


def test_wrong_bytes_leave_nothing(hub, tmp_path):
    """A wrong checksum deletes the file, so that no start takes it for whole or goes on with it."""
    with pytest.raises(SourceError, match="wrong checksum"):
        fetch(hub, tmp_path, data=b"other")
    assert list(tmp_path.iterdir()) == []


def test_more_bytes_than_promised_leave_nothing(hub, tmp_path):
    """A file that is longer than it should be is not written to its end."""
    with pytest.raises(SourceError, match="more than its 100 bytes"):
        fetch(hub, tmp_path, size=100)
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_is_not_there_is_named(tmp_path, pauses):
    """No connection is a passing fault, then a clear one."""
    with HubServer() as gone:
        pass
    with pytest.raises(SourceError, match="Connection refused"):
        fetch(gone, tmp_path)
    assert len(pauses) == ATTEMPTS - 1


def test_a_full_disk_is_not_taken_for_the_network(hub, tmp_path, monkeypatch):
    """A fault of the disk comes through at once."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        Client(hub.url, None).fetch(remote(hub), tmp_path / "f.bin", full)
    assert len(hub.requests) == 1


# ---- secrets ---------------------------------------------------------------------------------------------


def test_the_token_goes_to_its_host(hub, tmp_path):
    """Every request to the host carries the token."""
    Client(hub.url, "s3cret").fetch(remote(hub), tmp_path / "f.bin", lambda *_: None)
    assert hub.requests[0][1]["Authorization"] == "Bearer s3cret"


def test_a_redirect_takes_no_token_to_another_host(hub, tmp_path):
    """Content comes from wherever the host sends us, at the byte we need, without the secret."""
    (tmp_path / "f.bin.partial").write_bytes(DATA[:100])
    with HubServer() as front:
        front.faults["f.bin"] = [status(302, Location=remote(hub).url)]
        front.add("o/r", {"f.bin": DATA})
        Client(front.url, "s3cret").fetch(remote(front), tmp_path / "f.bin", lambda *_: None)
        assert front.requests[0][1]["Authorization"] == "Bearer s3cret"
    assert "Authorization" not in hub.requests[0][1]
    assert ranges(hub) == ["bytes=100-"]
    assert (tmp_path / "f.bin").read_bytes() == DATA


def test_a_redirect_within_the_host_keeps_the_token(hub, tmp_path):
    """A renamed repository is still the same host."""
    hub.faults["f.bin"] = [status(307, Location=f"/o/r/resolve/{COMMIT}/f.bin")]
    Client(hub.url, "s3cret").fetch(remote(hub), tmp_path / "f.bin", lambda *_: None)
    assert hub.requests[1][1]["Authorization"] == "Bearer s3cret"


def test_encryption_is_not_given_up():
    """A redirect from https to http is not followed."""
    request = urllib.request.Request("https://hub.test/f")
    with pytest.raises(SourceError, match=r"hub\.test redirects to an unencrypted address"):
        download._Redirects().redirect_request(request, None, 302, "", {}, "http://hub.test/f")


# ---- documents -------------------------------------------------------------------------------------------


def read(hub):
    return Client(hub.url + "/", None).read_json(f"{hub.url}/api/models/o/r/revision/main")


def test_a_document_is_read_with_patience(hub):
    """A passing fault is outlived for documents too."""
    hub.faults["main"] = [status(502), cut(3)]
    assert read(hub)["sha"] == COMMIT


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"\xff", b"[" * 100_000, b""])
def test_anything_but_an_object_is_refused(hub, body):
    """A host that is no hub is recognised as that."""
    hub.listing = body
    with pytest.raises(SourceError, match="does HF_ENDPOINT name a hub"):
        read(hub)


def test_documents_run_out_of_patience_too(hub):
    """A host that stays broken is given up."""
    hub.faults["main"] = [status(500)] * ATTEMPTS
    with pytest.raises(SourceError, match="answer 500"):
        read(hub)
