# SPDX-License-Identifier: Apache-2.0
"""Collects nodes and streams tensors: the graph stays in memory, its weights go to disk as they come.

All tensors above `INLINE_BYTES_MAX` are external data, so no graph meets protobuf's 2 GiB limit; each lies
at a page boundary, so that a runtime can map the file instead of reading it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from server.models.package import GRAPH, GRAPH_DATA

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
INLINE_BYTES_MAX = 1024
PAGE = 4096


class GraphWriter:
    """One graph being written into `folder`; call `save` once at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._data: BinaryIO = (folder / GRAPH_DATA).open("wb")

    def tensor(self, name: str, values: npt.NDArray[Any]) -> str:
        """Store a constant once under `name` and return the name.

        Raises:
            OSError: the disk is full.
        """
        if name in self._tensors:
            return name
        data = np.ascontiguousarray(values)
        if data.nbytes <= INLINE_BYTES_MAX:
            self._tensors[name] = numpy_helper.from_array(data, name)
            return name
        self._data.write(b"\0" * (-self._data.tell() % PAGE))
        offset = self._data.tell()
        self._data.write(data.data.cast("B"))
        proto = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(data.dtype), dims=data.shape)
        proto.data_location = TensorProto.EXTERNAL
        for key, value in (("location", GRAPH_DATA), ("offset", offset), ("length", data.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        self._tensors[name] = proto
        return name

    def node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node named after its first output, which is returned. An empty input is absent."""
        self._nodes.append(
            helper.make_node(op, list(inputs), list(outputs), name=outputs[0], domain=domain, **attributes)
        )
        return outputs[0]

    def input(self, name: str, kind: int, shape: Sequence[str | int]) -> str:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def output(self, name: str, kind: int, shape: Sequence[str | int]) -> None:
        """Declare a graph output."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def save(self, properties: Mapping[str, str]) -> None:
        """Write the graph beside its data and close both.

        Raises:
            OSError: the disk is full.
        """
        self._data.close()
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs, self._outputs, list(self._tensors.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="sampan")
        helper.set_model_props(model, dict(properties))
        (self.folder / GRAPH).write_bytes(model.SerializeToString())

    def close(self) -> None:
        """Give the data file back when a build fails half-way."""
        self._data.close()
