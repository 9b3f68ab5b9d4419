# SPDX-License-Identifier: Apache-2.0
"""The bench command says what is wrong with its flags and with the server it cannot reach."""

import argparse

import pytest

from server.cli import bench


def parse(*flags):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(flags)


def test_counts_are_a_list():
    """Several user counts make several runs."""
    assert (1, 8) == parse("-c", "1,8").clients


@pytest.mark.parametrize("flag", ["0", "a", "4,,8"])
def test_bad_counts_are_refused(flag, capsys):
    """A count that is no positive number stops the command with a reason."""
    with pytest.raises(SystemExit):
        parse("-c", flag)
    assert "argument -c" in capsys.readouterr().err


def test_an_unreachable_server_is_one_line(capsys, unused_tcp_port):
    """No traceback when nobody listens."""
    assert 1 == bench.run(parse("-c", "1", "--url", f"http://127.0.0.1:{unused_tcp_port}/v1"))
    assert "cannot reach" in capsys.readouterr().err
