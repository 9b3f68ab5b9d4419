# SPDX-License-Identifier: Apache-2.0
"""A family is a table of differences from the plain decoder block; adding one adds a row here and proof of it.

Nothing else in the builder asks for a family's name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs.

    `ties_by_default` answers for a checkpoint that neither holds an output head nor says whether it is tied.
    """

    name: str
    ties_by_default: bool


FAMILIES = {
    "llama": Family(name="llama", ties_by_default=False),
}
