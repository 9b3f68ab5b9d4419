# SPDX-License-Identifier: Apache-2.0
"""Keys and values of tokens. pool: which slot is whose (pure) · slots: the memory of running rows."""
