# SPDX-License-Identifier: Apache-2.0
"""Files on disk → a verified model package; offline work, never in a serving process.

source    a name, a hub address, a file or a folder → local files (fetch, resume, verify)
readers/  local files → Checkpoint: one set of tensor names, a tokenizer, end ids
graph/    Checkpoint → the engine's ONNX graph, by a table of family differences
quantize  one weight matrix → the nodes and tensors of its product
build     the recipe that joins them
check     a package against its reference: perplexity, agreement
package   the finished folder; the only module here that a server imports
"""
