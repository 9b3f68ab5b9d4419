# SPDX-License-Identifier: Apache-2.0
"""The OpenAI Realtime protocol, its text subset: `decode` reads client events, `encode` spells ours.

`codec` joins both for one connection.
"""
