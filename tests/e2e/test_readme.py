# SPDX-License-Identifier: Apache-2.0
"""The README's examples, run as they stand against a real server; only its address is changed."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks_of

pytestmark = pytest.mark.slow

NODE = ("node", "--experimental-websocket", "--no-warnings", "--input-type=module", "-e")
RUNNERS = {"python": (sys.executable, "-c"), "sh": ("sh", "-euc"), "js": NODE}
EXAMPLES = [(language, code) for language, code in blocks_of(ROOT / "README.md") if language in RUNNERS]
TOLD = ("console", "toml")  # what installs, serves for ever, or is tested by its own tests


def test_every_block_is_run_or_told():
    """No language is left out by a slip."""
    assert {language for language, _ in blocks_of(ROOT / "README.md")} <= {*RUNNERS, *TOLD}


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=[language for language, _ in EXAMPLES])
def test_the_example_works(language, code, server_process, sampan_home, tmp_path):
    """It ends well and says something."""
    runner = RUNNERS[language]
    if shutil.which(runner[0]) is None:
        pytest.skip(f"{runner[0]} is not installed")
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{server_process.port}")
    code = code.replace("sampan chat", f"sampan chat --url {shlex.quote(server_process.url)}")
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SAMPAN_HOME": str(sampan_home),
    }
    done = subprocess.run(
        [*runner, code], cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
