# SPDX-License-Identifier: Apache-2.0
"""The graph on disk: weights beside it, found from anywhere, refused when they are not its own."""

import errno
import os
import shutil

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from server.models.graph.writer import INLINE_BYTES_MAX, PAGE, GraphWriter
from server.models.package import GRAPH, GRAPH_DATA

WEIGHT = np.arange(600, dtype=np.float32).reshape(20, 30)


@pytest.fixture
def folder(tmp_path):
    """A graph of one product, saved."""
    path = tmp_path / "made"
    path.mkdir()
    writer = GraphWriter(path)
    writer.input("x", TensorProto.FLOAT, ["rows", 20])
    small = writer.tensor("small", np.float32([2]))
    writer.node("Mul", [writer.node("MatMul", ["x", writer.tensor("w", WEIGHT)], ["y"]), small], ["z"])
    writer.output("z", TensorProto.FLOAT, ["rows", 30])
    writer.save({"who": "a test"})
    return path


def run(path):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    return session.run(None, {"x": np.ones((1, 20), np.float32)})[0]


def check(path):
    np.testing.assert_allclose(run(path), WEIGHT.sum(axis=0, keepdims=True) * 2)


def test_a_large_tensor_lies_at_a_page_of_the_data_file(folder):
    """Above the threshold a tensor is external, at a page's boundary; below it stays in the graph."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    small, large = (
        next(each for each in model.graph.initializer if each.name == name) for name in ("small", "w")
    )
    assert small.data_location == TensorProto.DEFAULT
    place = {entry.key: entry.value for entry in large.external_data}
    assert place["location"] == GRAPH_DATA
    assert int(place["offset"]) % PAGE == 0
    assert int(place["length"]) == WEIGHT.nbytes > INLINE_BYTES_MAX
    assert {entry.key: entry.value for entry in model.metadata_props} == {"who": "a test"}


def test_every_tensor_starts_at_its_own_page(tmp_path):
    """Tensors of odd sizes follow each other page by page, and hold what was given, whatever its order."""
    writer = GraphWriter(tmp_path)
    given = {f"t{size}": np.arange(size, dtype=np.uint8) for size in (1025, 4096, 5000)}
    given["turned"] = WEIGHT.T
    for name, values in given.items():
        writer.tensor(name, values)
    writer.save({})
    model = onnx.load(tmp_path / GRAPH)
    for tensor in model.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), given[tensor.name])
    assert (tmp_path / GRAPH_DATA).stat().st_size == (1 + 1 + 2) * PAGE + WEIGHT.nbytes


def test_a_name_is_stored_once(tmp_path):
    """A second tensor of a name is the first one: shared constants cost nothing."""
    writer = GraphWriter(tmp_path)
    assert writer.tensor("w", WEIGHT) == writer.tensor("w", WEIGHT) == "w"
    writer.save({})
    assert (tmp_path / GRAPH_DATA).stat().st_size == WEIGHT.nbytes


def test_a_graph_loads_from_anywhere(folder, tmp_path, monkeypatch):
    """From another working directory, through a link to the folder, and after the folder moved."""
    monkeypatch.chdir("/")
    check(folder / GRAPH)
    (tmp_path / "link").symlink_to(folder)
    check(tmp_path / "link" / GRAPH)
    folder.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    check(os.path.relpath(tmp_path / "moved" / GRAPH))


def test_a_graph_without_its_data_does_not_load(folder):
    """Missing or short data is an error that names the file, never an answer."""
    path = folder / GRAPH_DATA
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(Exception, match=r"External initializer: w|out of bounds|size"):
        run(folder / GRAPH)
    path.unlink()
    with pytest.raises(Exception, match=GRAPH_DATA):
        run(folder / GRAPH)


def test_a_graph_finds_no_data_outside_its_folder(folder, tmp_path):
    """A graph that was changed to point elsewhere is refused by the runtime."""
    shutil.move(folder / GRAPH_DATA, tmp_path / "w.data")
    model = onnx.load(folder / GRAPH, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../w.data" if entry.key == "location" else entry.value
    (folder / GRAPH).write_bytes(model.SerializeToString())
    with pytest.raises(Exception, match=r"escape|outside|External data path"):
        run(folder / GRAPH)


def test_a_full_disk_is_told(tmp_path):
    """A write that the disk refuses reaches the caller as it is; the file is given back."""
    writer = GraphWriter(tmp_path)
    writer._data.close()
    writer._data = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", buffering=0)
    with pytest.raises(OSError) as caught:
        writer.tensor("w", WEIGHT)
    assert caught.value.errno == errno.ENOSPC
    writer.close()
    assert writer._data.closed
