# SPDX-License-Identifier: Apache-2.0
"""Sockets, sessions and HTTP: the only floor that knows Starlette and uvicorn.

listener   bytes ⇄ ASGI, with a bound on everything a client may make us hold
socket     shell 1: one WebSocket: handshake, reader, writer, close
session/   the machine of one conversation and the shell that performs it
http/      chat completions, models, probes, metrics, the page
access/    which websites may come in
drain      the orderly stop
app        the composition root: the only module that knows concrete classes
"""
