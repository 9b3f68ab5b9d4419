# SPDX-License-Identifier: Apache-2.0
"""What one turn does, whichever door it came through: `turn` runs it, `history` makes it fit the context.

Nothing here knows a socket or a wire format; the model is reached through `core.ports` alone.
"""
