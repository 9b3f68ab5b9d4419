# SPDX-License-Identifier: Apache-2.0
"""Sampan: a WebSocket-first realtime conversation server for small machines."""

import os

# ONNX Runtime reads this once, while it loads: it must be set before anything of ours can import it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__version__ = "0.1.0"
