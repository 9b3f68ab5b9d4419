# SPDX-License-Identifier: Apache-2.0
"""Files on disk → a verified model package; offline work, never in a serving process.

source/    a name, a file, a folder, an address of a hub or an index → an opened checkpoint
readers/   local files → Checkpoint: one set of tensor names, a tokenizer, end ids
graph/     Checkpoint → the engine's ONNX graph, by a table of family differences
quantize   one weight matrix → the nodes and tensors of its product
build      the recipe that joins them
reference  the same forward pass in plain numpy: the oracle of all the others
check      a package against its reference: perplexity, agreement
texts      what is measured and calibrated on
package    the finished folder; the only module here that a server imports
"""
