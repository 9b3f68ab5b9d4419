# SPDX-License-Identifier: Apache-2.0
"""Numbers. runner: tokens → log-probabilities (ONNX Runtime) · sampler: those → token · threads: how many."""
