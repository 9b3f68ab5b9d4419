# SPDX-License-Identifier: Apache-2.0
"""Checkpoint → ONNX graph: `families` says how models differ, `decoder` lays the blocks, `rope` the angles.

Inputs and outputs of every graph stand in `decoder`; `writer` streams tensors to the data file.
"""
