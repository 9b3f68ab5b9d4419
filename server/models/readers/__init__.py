# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk, each format behind the one `checkpoint.Checkpoint` seam."""
