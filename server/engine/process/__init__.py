# SPDX-License-Identifier: Apache-2.0
"""The engine's own OS process and the way to it.

    worker      inside: the process's one thread, sockets and steps in turn
    messages    what crosses: frozen messages ⇄ bytes
    link        outside: the gateway's socket to one engine
    supervisor  outside: starts it, watches it, starts it again
    connection  outside: greeted or not, heard or silent; puts link and supervisor together

Only `worker` may import what computes: a gateway that uses the rest never loads ONNX Runtime.
"""
