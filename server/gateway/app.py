# SPDX-License-Identifier: Apache-2.0
"""The composition root: settings → objects → one ASGI app, and the process that serves it.

Owns which concrete classes stand behind the ports; the only module of the gateway that knows any. Invariant:
what `serve` opens it closes, in the opposite order, whatever happened between. It must never hold the logic
of a door.
"""

import logging
import os
import random
import resource
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from server import __version__
from server.core.clock import SystemClock, new_id
from server.core.config import Config, describe
from server.core.errors import ServerError, error_of
from server.core.events import SessionSettings
from server.core.metrics import Metrics
from server.core.ports import Generator
from server.core.types import SamplingParams
from server.engine.engine import Engine
from server.engine.process.supervisor import Supervisor, engine_command
from server.gateway.access.origins import OriginPolicy
from server.gateway.drain import Drain
from server.gateway.http.admin import Admin
from server.gateway.http.assets import asset_routes, read_assets, static_folder
from server.gateway.http.openai import ChatCompletions, Models
from server.gateway.http.replies import Edge, error_response, on_http_exception, on_server_error
from server.gateway.listener import ClientNoise, GatewayServer, ListenConfig, bind
from server.gateway.measured import MeasuredGenerator
from server.gateway.session.conversation import SessionLimits
from server.gateway.socket import SocketDoor
from server.models.package import data_home, find_package
from server.wire.codec import CODECS

SPARE_FILES = 64
"""Open files besides connections: listener, log, the engine's pipes and sockets, what the loop holds."""

_CLOCK = SystemClock()
_log = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Listen and answer until told to stop; returns the exit status.

    Raises:
        PackageError: the model's package can't be used; nothing was opened.
    """
    try:
        listener = bind(config.server)
    except OSError as error:
        _log.error("cannot_listen", extra={"reason": error.strerror})
        return 1
    with listener, tempfile.TemporaryDirectory(prefix="sampan-") as private:
        address = config.engine.connect or f"ipc://{private}/engine"
        engine = _engine(config, address)
        drain = Drain(deadline_s=config.server.drain_timeout_s, rng=random.Random())  # noqa: S311 - jitter
        app = build_app(config, engine, drain=drain, resources=_running(engine), restarts=_restarts_of(engine))
        _prepare_process(config)
        server = GatewayServer(ListenConfig(app, config.server), on_stop=drain.begin, drain=drain.run)
        _log.info("listening", extra={"address": _name_of(listener)})
        try:
            server.run(sockets=[listener])
        except SystemExit:  # uvicorn's way to say that the lifespan failed, which it has logged
            return 1
        finally:
            if config.server.uds:
                Path(config.server.uds).unlink(missing_ok=True)
    _log.info("stopped")
    return 0


def build_app(
    config: Config,
    generator: Generator,
    *,
    drain: Drain,
    resources: AbstractAsyncContextManager[None] | None = None,
    restarts: Callable[[], int] = lambda: 0,
) -> Starlette:
    """Put the doors before a generator.

    Args:
        config: the settings.
        generator: answers every turn.
        drain: the orderly stop; its owner decides when.
        resources: entered before the first request and left after the last.
        restarts: how often the generator's process has been started again, for metrics.

    Raises:
        ValueError: an origin of the settings that is none.
    """
    metrics = Metrics()
    metrics.watch(generator.status)
    engine = config.engine
    metrics.build.info({"version": __version__, "model": engine.model, "quantization": engine.quantization})
    origins = OriginPolicy.parse(config.server.allowed_origins)
    if origins.is_any_allowed:
        _log.warning("any_website_may_connect", extra={"setting": "server.allowed_origins"})
    app = Starlette(
        routes=[
            *_probes(generator, drain, metrics, restarts),
            *_completions(config, generator, drain, metrics),
            *_sockets(config, generator, drain, metrics, origins),
            *asset_routes(read_assets(static_folder())),
        ],
        middleware=[
            Middleware(
                Edge,
                origins=origins,
                new_id=new_id,
                on_error=lambda code: metrics.errors.labels(code=code).inc(),
            )
        ],
        exception_handlers={ServerError: on_server_error, HTTPException: on_http_exception},
        lifespan=lambda _: resources or nullcontext(),
    )
    app.router.redirect_slashes = False
    app.router.default = _unrouted
    return app


def _probes(
    generator: Generator, drain: Drain, metrics: Metrics, restarts: Callable[[], int]
) -> list[BaseRoute]:
    num_counted = 0

    def exposition() -> tuple[bytes, str]:
        nonlocal num_counted
        metrics.engine_restarts.inc(restarts() - num_counted)
        num_counted = restarts()
        return metrics.exposition()

    admin = Admin(generator=generator, drain=drain, exposition=exposition)
    return [
        Route("/livez", admin.livez),
        Route("/readyz", admin.readyz),
        Route("/metrics", admin.metrics),
    ]


def _completions(config: Config, generator: Generator, drain: Drain, metrics: Metrics) -> list[BaseRoute]:
    door = ChatCompletions(
        generator=MeasuredGenerator(generator, metrics, door="completions", now=_CLOCK.now),
        drain=drain,
        new_id=new_id,
        now=_CLOCK.wall,
        sampling=_sampling(config),
        body_bytes_max=config.server.body_bytes_max,
    )
    models = Models(generator)
    return [
        Route("/v1/chat/completions", door, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model_id:path}", models.retrieve),
    ]


def _sockets(
    config: Config, generator: Generator, drain: Drain, metrics: Metrics, origins: OriginPolicy
) -> list[BaseRoute]:
    session = config.session
    door = SocketDoor(
        generator=MeasuredGenerator(generator, metrics, door="socket", now=_CLOCK.now),
        origins=origins,
        drain=drain,
        new_id=new_id,
        limits=SessionLimits(
            num_items_max=session.items_max,
            item_bytes_max=session.item_bytes_max,
            conversation_bytes_max=session.session_bytes_max,
            num_side_turns_max=session.side_turns_max,
            slow_s_max=config.server.slow_reader_timeout_s,
        ),
        settings=SessionSettings(model="", instructions=session.instructions, sampling=_sampling(config)),
        num_sockets_max=config.server.sockets_max,
        outbox_bytes_max=config.server.outbox_bytes_max,
        metrics=metrics,
    )
    sockets = [WebSocketRoute(path, door.serve) for path in CODECS]
    return [*sockets, *(Route(path, _upgrade_required) for path in CODECS)]


def _sampling(config: Config) -> SamplingParams:
    given = config.sampling
    return SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        max_tokens=given.max_tokens or None,
    )


async def _upgrade_required(_: Request) -> Response:
    error = error_of("upgrade_required", "this door speaks WebSocket: connect with ws:// or wss://")
    response = error_response(error)
    response.headers["upgrade"] = "websocket"
    return response


async def _unrouted(scope: Scope, receive: Receive, send: Send) -> None:
    """Say 404 to both kinds of caller: a bare refusal of a WebSocket reads as a lack of rights."""
    if scope["type"] != "websocket":
        raise HTTPException(404)
    error = error_of("not_found", f"there is no WebSocket here; connect to {' or '.join(CODECS)}")
    await WebSocket(scope, receive, send).send_denial_response(error_response(error))


def _engine(config: Config, address: str) -> Engine:
    """The engine of the settings: a process of our own, or the one at an address."""
    engine = config.engine
    home = Path(engine.home) if engine.home else data_home(os.environ)
    own = replace(config, engine=replace(engine, home=str(home), listen=address, connect=""))
    flags = ("--config", os.devnull, *describe.flags_of(own, "engine", "log"), "--child")
    supervisor = Supervisor(engine_command(*flags), hang_timeout_s=engine.hang_timeout_s)
    return Engine(
        find_package(home, engine.model, engine.quantization),
        address,
        max_model_len=engine.max_model_len,
        supervisor=None if engine.connect else supervisor,
        hang_timeout_s=engine.hang_timeout_s,
    )


@asynccontextmanager
async def _running(engine: Engine) -> AsyncIterator[None]:
    await engine.start()
    try:
        yield
    finally:
        await engine.close()


def _restarts_of(engine: Engine) -> Callable[[], int]:
    def restarts() -> int:
        process = engine.snapshot().process
        return max(0, process.num_starts - 1) if process else 0

    return restarts


def _prepare_process(config: Config) -> None:
    """Quiet the libraries, and allow as many files as there may be connections."""
    logging.getLogger("uvicorn.error").addFilter(ClientNoise())
    needed = config.server.connections_max + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    if hard < needed:
        _log.warning(
            "too_few_files", extra={"limit": hard, "needed": needed, "setting": "server.connections_max"}
        )


def _name_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    return f"unix:{name}" if isinstance(name, str) else f"{name[0]}:{name[1]}"
