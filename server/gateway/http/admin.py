# SPDX-License-Identifier: Apache-2.0
"""What machines ask: are you alive, may I send work, how do you do.

Invariant: `/livez` says only that the event loop turns, so a busy server is never killed for being busy;
`/readyz` says whether new work would be taken, and why not: a full queue is ready, for it answers 429. None
of them waits, computes or goes through the queue they report on.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from server.core.ports import Generator
from server.gateway.drain import Drain
from server.gateway.http.replies import json_response
from server.wire.frames import dump


class Admin:
    """The probes.

    Args:
        generator: asked how it stands.
        drain: asked whether we still take work.
        exposition: the metrics as a body and its media type.
    """

    def __init__(
        self, *, generator: Generator, drain: Drain, exposition: Callable[[], tuple[bytes, str]]
    ) -> None:
        self._generator = generator
        self._drain = drain
        self._exposition = exposition

    async def livez(self, _: Request) -> Response:
        """The loop turns."""
        return json_response(dump({"status": "alive"}))

    async def readyz(self, _: Request) -> Response:
        """200 or 503, with the reason in words and what runs and waits."""
        status = self._generator.status()
        is_ready = status.is_ready and not self._drain.is_draining
        reason = "draining" if self._drain.is_draining else status.reason
        answer = {
            "status": "ready" if is_ready else "not_ready",
            "reason": "" if is_ready else reason or "the engine is not ready",
            "running": status.num_running,
            "waiting": status.num_waiting,
            "waiting_tokens": status.num_waiting_tokens,
        }
        headers = {} if is_ready else {"retry-after": "1"}
        return json_response(dump(answer), status=200 if is_ready else 503, headers=headers)

    async def metrics(self, _: Request) -> Response:
        """The Prometheus exposition."""
        body, media_type = self._exposition()
        return Response(body, media_type=media_type, headers={"cache-control": "no-store"})
