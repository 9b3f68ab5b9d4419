# SPDX-License-Identifier: Apache-2.0
"""Every setting there is: its default, its unit (in the name), its bounds and what it is for.

A setting is one line of one section. A bound beside it says what can't be right on any machine; what
depends on another setting stands in `relations`. Nothing here reads a file or an environment.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, get_type_hints

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as machines see it. `kind` is str, int, float, bool, or tuple for a list of strings."""

    section: str
    name: str
    kind: type
    default: Value
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The full name: `engine.max_num_seqs`."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable: `SAMPAN_ENGINE__MAX_NUM_SEQS`."""
        return f"SAMPAN_{self.section}__{self.name}".upper()

    @property
    def flag(self) -> str:
        """The command-line flag: `--engine.max-num-seqs`."""
        return "--" + self.path.replace("_", "-")


def setting(
    default: Value,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that knows its bounds (both inclusive) and its meaning."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where we listen, and what one client may take."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every one of this machine's")
    port: int = setting(8000, "TCP port; 0 lets the system choose", low=0, high=65_535)
    uds: str = setting("", "listen on this Unix socket instead of a port, for a proxy on the same machine")
    allowed_origins: tuple[str, ...] = setting(
        (), 'websites whose pages may connect, such as https://shop.example; "*" is any; our own always may'
    )
    trusted_proxies: tuple[str, ...] = setting(
        (), 'addresses or networks whose X-Forwarded-* is believed; "*" only behind a Unix socket'
    )
    sockets_max: int = setting(1_000, "WebSockets open at once; one more is refused", low=1, high=1_000_000)
    connections_max: int = setting(
        2_000, "connections at once, HTTP and WebSocket together; one more is cut", low=1, high=2_000_000
    )
    frame_bytes_max: int = setting(65_536, "bytes of one WebSocket message", low=1_024, high=16_777_216)
    body_bytes_max: int = setting(262_144, "bytes of one HTTP body", low=1_024, high=16_777_216)
    outbox_bytes_max: int = setting(
        262_144, "bytes that may wait for a client that reads slowly", low=16_384, high=67_108_864
    )
    slow_reader_timeout_s: float = setting(
        5.0, "seconds that more than that may wait before the socket is closed", low=0.1, high=600
    )
    ping_interval_s: float = setting(20.0, "seconds between pings to a WebSocket client", low=0.5, high=3_600)
    ping_timeout_s: float = setting(20.0, "seconds a client has to answer a ping", low=0.5, high=3_600)
    drain_timeout_s: float = setting(
        30.0, "seconds that running answers have to end when the server is told to stop", low=0, high=3_600
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which model answers, and how much it takes on at once."""

    model: str = setting("smollm2-135m-instruct", "name of the model; `sampan model list` shows what is there")
    quantization: str = setting("w8a8", "arithmetic of the model", choices=("w8a8", "w8", "w4", "fp32"))
    num_threads: int = setting(
        0, "threads that compute; 0 fits them to this machine's CPU quota", low=0, high=1_024
    )
    max_num_seqs: int = setting(
        16, "answers generated at once; each holds memory for its tokens", low=1, high=1_024
    )
    max_model_len: int = setting(2_048, "tokens of one conversation and its answer", low=16, high=1_048_576)
    max_num_batched_tokens: int = setting(256, "tokens computed in one step", low=5, high=65_536)
    prefill_chunk_tokens: int = setting(128, "tokens of a prompt computed in one forward", low=4, high=65_536)
    queue_max: int = setting(256, "requests that may wait; one more is told to retry", low=0, high=1_000_000)
    queue_tokens_max: int = setting(
        65_536, "prompt tokens that may wait, over all requests", low=16, high=1_000_000_000
    )
    queue_timeout_s: float = setting(
        60.0, "seconds a request may wait before it is refused", low=0, high=86_400
    )
    hang_timeout_s: float = setting(
        10.0, "seconds without a sign of life after which the engine is restarted", low=1, high=3_600
    )
    connect: str = setting(
        "", "use the engine at this ZeroMQ address (ipc://…, tcp://…) instead of starting one"
    )
    listen: str = setting("", "ZeroMQ address of `sampan engine`; empty: a private socket file")
    home: str = setting("", "folder of models and downloads; empty: $SAMPAN_HOME or ~/.local/share/sampan")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What one conversation may hold, and how it begins."""

    instructions: str = setting(
        "", "what the model is told before a conversation, unless the client says otherwise"
    )
    items_max: int = setting(1_000, "messages of one conversation", low=2, high=1_000_000)
    item_bytes_max: int = setting(16_384, "bytes of one message's text", low=16, high=16_777_216)
    session_bytes_max: int = setting(262_144, "bytes of one conversation's text", low=1_024, high=1_073_741_824)
    side_turns_max: int = setting(4, "answers beside the conversation's own at once", low=0, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How a word is chosen where the client does not say."""

    temperature: float = setting(0.7, "0 always takes the likeliest token; higher is freer", low=0, high=2)
    top_k: int = setting(0, "choose among this many likeliest tokens; 0 is off", low=0, high=1_000_000)
    top_p: float = setting(1.0, "choose among the likeliest tokens that hold this share", low=0, high=1)
    min_p: float = setting(0.0, "drop tokens below this share of the likeliest", low=0, high=1)
    max_tokens: int = setting(
        0, "tokens of one answer; 0 is whatever the context still holds", low=0, high=1_048_576
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written to standard error."""

    level: str = setting(
        "info", "the quietest line that is written", choices=("debug", "info", "warning", "error")
    )
    format: str = setting("text", "lines for people or for machines", choices=("text", "json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree. `sources` tells where each setting's value came from, by its full name."""

    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    session: SessionConfig = SessionConfig()
    sampling: SamplingConfig = SamplingConfig()
    log: LogConfig = LogConfig()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def value_of(self, path: str) -> Value:
        """The value of a setting by its full name.

        Raises:
            AttributeError: there is no such setting.
        """
        section, _, name = path.partition(".")
        value: Value = getattr(getattr(self, section), name)
        return value

    def source_of(self, path: str) -> str:
        """Where a setting's value came from."""
        return self.sources.get(path, "default")


SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "server": ServerConfig,
        "engine": EngineConfig,
        "session": SessionConfig,
        "sampling": SamplingConfig,
        "log": LogConfig,
    }
)


def _settings_of(section: str, kind: type) -> Iterator[Setting]:
    hints = get_type_hints(kind)
    entry: Field[Any]
    for entry in fields(kind):
        assert entry.default is not MISSING, "a setting has a default"
        hint = hints[entry.name]
        plain = hint if isinstance(hint, type) and hint in (str, int, float, bool) else tuple
        yield Setting(section=section, name=entry.name, kind=plain, default=entry.default, **entry.metadata)


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {each.path: each for name, kind in SECTIONS.items() for each in _settings_of(name, kind)}
)
"""Every setting by its full name, in the order of the tree."""
