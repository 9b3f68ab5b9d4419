# SPDX-License-Identifier: Apache-2.0
"""Sampan: a WebSocket-first realtime conversation server for small machines.

Processes: browsers, SDKs, wscat ─http, ws─▶ gateway ─ZeroMQ─▶ engine (started and watched by the gateway)

Layers, downwards only:  __main__ > cli > gateway > turns | wire | engine > models > core
Three pillars over one vocabulary: they meet in `core.ports`, and only `gateway.app` knows concrete classes.

A token's way: six shells that do, and beside each the pure module that decides.
    gateway/socket        wire/<codec>                    bytes → Command         frames ← Event
    gateway/session/live  session, outbox                 Command → StartTurn     deltas merged, bounded
    turns/turn            history                         items → request         text → Delta, TurnFinished
    engine/engine         text/*                          request → ids           ids → text
    engine/loop           scheduler, admission            Submission → Step       tokens → StepOutput
    engine/compute/runner sampler                         Step → logits           logits → token
HTTP joins at the third: one way for every door. Between the fourth and the fifth lies the process border.

What always holds
    Every request ends exactly once, with a reason. A dead engine is a pause: what ran is submitted again.
    The gateway's loop never computes. Deciders get `now` as a number; they know no clock, chance or I/O.
    A token depends on its request, the seed and its position: not on who else is in the batch.
    Every queue, buffer and wait has a bound, and `sampan config --memory` adds them up.
    No text of users and no secret is in the log; nothing calls home.

Decisions, and what would change them
    One engine process, not threads: a crash or a hang of native code must not take sockets down.
    ZeroMQ and msgpack between them: the same on one machine and on two; no broker to run.
    uvicorn with an own drain: its shutdown cuts sockets at once. Gone when it can be told to wait.
    int8 weights, activations quantised per token: per tensor, one user's text would touch another's.
    No compression on sockets: it holds memory for each of them, and frames of a few words gain nothing.
"""

import os

# ONNX Runtime reads this once, while it loads: it must be set before anything of ours can import it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__version__ = "0.1.0"
