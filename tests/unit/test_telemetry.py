# SPDX-License-Identifier: Apache-2.0
"""Nothing of ours calls home: ONNX Runtime is told so before it can load."""

import json
import subprocess
import sys

import pytest

PROBE = """
import importlib.abc, json, os, sys

os.environ.pop("ORT_DISABLE_TELEMETRY", None)
seen = []

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            seen.append(os.environ.get("ORT_DISABLE_TELEMETRY"))

sys.meta_path.insert(0, Watch())
__import__(sys.argv[1])
print(json.dumps(seen))
"""


def seen_by(module):
    """What the variable held each time ONNX Runtime began to load, in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["server.engine.compute.runner", "server.models.check"])
def test_telemetry_is_off_before_the_runtime_loads(module):
    """Each module that loads ONNX Runtime finds the variable set; it is read once, while loading."""
    assert seen_by(module) == ["1"]


def test_the_probe_sees_a_late_setting():
    """The probe itself fails where nothing of ours was imported first."""
    assert seen_by("onnxruntime") == [None]
