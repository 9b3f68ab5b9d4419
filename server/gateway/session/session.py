# SPDX-License-Identifier: Apache-2.0
"""The pure machine of one session: its settings, items and turns. Being written; the constructor is fixed."""

from collections.abc import Callable
from dataclasses import dataclass

from server.core.events import SessionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may hold. Bytes are those of text in UTF-8."""

    num_items_max: int = 1_000
    item_bytes_max: int = 65_536
    conversation_bytes_max: int = 1_048_576
    num_side_turns_max: int = 4
    slow_s_max: float = 5.0


class Session:
    """Decides for one client.

    Args:
        session_id: its public name.
        settings: what it starts with; `settings.model` must be known.
        new_id: draws a process-unique id from a prefix.
        limits: what it may hold.
        model_ids: models that a client may name.
    """

    def __init__(
        self,
        *,
        session_id: str,
        settings: SessionSettings,
        new_id: Callable[[str], str],
        model_ids: tuple[str, ...],
        limits: SessionLimits = SessionLimits(),
    ) -> None:
        raise NotImplementedError
