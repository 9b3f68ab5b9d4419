# SPDX-License-Identifier: Apache-2.0
"""Bytes and JSON ⇄ commands and events: sans-I/O, one codec object per connection.

`frames` is the only place that parses or writes JSON, `fields` the only place that reads a client's field;
`codec` chooses by path. `realtime` and `plain` speak over sockets, `completions` and `unary` over HTTP.
Nothing here waits, knows a clock or opens anything.
"""
