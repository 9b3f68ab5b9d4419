# SPDX-License-Identifier: Apache-2.0
"""Who may come in: which websites may open a door from a visitor's browser.

Pure advisers of the shells. Nothing here answers a client or keeps state.
"""
