# SPDX-License-Identifier: Apache-2.0
"""The HTTP doors: chat completions and models, probes and metrics, the page, and what all replies share.

`replies` is the floor under the others: how an error, a body and a header look on HTTP. The doors know turns
and wire, never a concrete engine.
"""
