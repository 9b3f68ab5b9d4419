# SPDX-License-Identifier: Apache-2.0
"""A person with `wscat`: one line in, the answer out. Skipped where the program is not."""

import asyncio
import shutil

import pytest

WSCAT = shutil.which("wscat")


@pytest.mark.skipif(WSCAT is None, reason="wscat is not installed (npm install -g wscat)")
async def test_a_line_gets_its_answer(serve):
    """As a pipe: the socket is opened, the line sent, the answer printed."""
    house = await serve("Par", "is")
    command = [WSCAT, "--connect", f"{house.ws}/chat", "--execute", "capital of France?", "--wait", "1"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert b"is listening" in out, err
    pieces = out.decode().replace("<", "").split()
    assert "Paris" in "".join(pieces)
    assert house.generator.requests[0].items[-1].text == "capital of France?"
