# SPDX-License-Identifier: Apache-2.0
"""One client's conversation: `session` decides, `outbox` bounds what waits for the client, `live` performs.

`session` and `outbox` are pure; `live` is the only one that waits, and outlives nothing it started.
"""
