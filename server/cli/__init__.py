# SPDX-License-Identifier: Apache-2.0
"""The `sampan` command: one file a verb."""


def main() -> int:
    """Run the command line."""
    return 0
