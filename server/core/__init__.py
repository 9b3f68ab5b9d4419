# SPDX-License-Identifier: Apache-2.0
"""The vocabulary every layer shares: values, messages, ports, errors, settings, clock, log and metric names.

Nothing here knows a socket, an array or another package of ours, and nothing here waits. Read `types` for the
nouns, `events` for what travels between a client and a session, `ports` for what a turn needs from the world,
`errors` for how each of them fails.
"""
