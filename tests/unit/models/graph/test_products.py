# SPDX-License-Identifier: Apache-2.0
"""Products: how far each may be from exact, what is refused, and that no row depends on another."""

from contextlib import closing

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from server.models.graph.products import EVEN_MAX, Products
from server.models.graph.rotation import LEFT_MAX, Rotation
from server.models.graph.writer import GraphWriter
from server.models.package import GRAPH, QUANTIZATIONS
from server.models.quantize import BLOCK
from server.models.readers.checkpoint import CheckpointError, PackedWeight

ROUNDED = [name for name in QUANTIZATIONS if name != "fp32"]


def matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def grid(rows, columns, seed=0):
    """A random 4-bit grid, and the weight that it stands for."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 16, (rows, columns), np.uint8)
    scales = random.uniform(0.5, 2, (rows, columns // BLOCK)).astype(np.float32)
    minimums = (-8 * scales).astype(np.float32)
    weight = values * scales.repeat(BLOCK, axis=1) + minimums.repeat(BLOCK, axis=1)
    return PackedWeight(bits=4, values=values, scales=scales, minimums=minimums), weight


def product(folder, quantization, weight, packed=None, *, name="o", rounds_to_4_bits=True, is_even=False):
    """A graph of one product, as a function [rows, tokens, in] → [rows, tokens, out]."""
    writer = GraphWriter(folder)
    writer.input("x", TensorProto.FLOAT, ["rows", "tokens", weight.shape[1]])
    products = Products(writer, quantization, rounds_to_4_bits=rounds_to_4_bits)
    with closing(writer):
        output = products.add(name, "x", weight, packed, is_even=is_even)
        writer.output(output, TensorProto.FLOAT, ["rows", "tokens", len(weight)])
        writer.save({})
    return load(folder)


def load(folder):
    """A graph of one input and one output as a function."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(str(folder / GRAPH), options, ["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("columns", [64, 96, 100])
@pytest.mark.parametrize("name", ["o", "down", "head"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_product_is_as_near_as_its_bits_allow(tmp_path, quantization, name, columns):
    """Exact in fp32, within 2 % with 8 bits, within 15 % with 4; widths need not be whole blocks."""
    weight, x = matrix(48, columns), matrix(10, columns, 1).reshape(2, 5, columns)
    limit = {"fp32": 1e-6, "w4": 0.02 if name == "head" else 0.15}.get(quantization, 0.02)
    found = product(tmp_path, quantization, weight, name=name)(x)
    assert relative_error(found, x @ weight.T) < limit


@pytest.mark.parametrize("name", ["o", "down"])
def test_w8a8_rows_have_the_same_bits_in_any_company(tmp_path, name):
    """A row beside a thousandfold larger one, and alone: bit for bit the same."""
    run = product(tmp_path, "w8a8", matrix(48, 64), name=name)
    x = matrix(8, 64, 2).reshape(8, 1, 64)
    x[3] *= 1000
    together = run(x)
    for row in range(8):
        np.testing.assert_array_equal(run(x[row : row + 1])[0], together[row])
    np.testing.assert_array_equal(run(x.reshape(1, 8, 64))[0], together[:, 0])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_of_zeros_gives_zeros(tmp_path, quantization):
    """No scale can be had from zeros; they stay exact zeros, and the rows beside them are untouched."""
    run = product(tmp_path, quantization, matrix(48, 64))
    x = matrix(3, 64, 1).reshape(1, 3, 64)
    beside = run(x)
    x[0, 1] = 0
    found = run(x)
    assert not found[0, 1].any()
    np.testing.assert_array_equal(found[0, [0, 2]], beside[0, [0, 2]])


def test_w8a8_does_not_saturate(tmp_path):
    """The largest int8 values on both sides add up exactly: a sum that 16 bits would cut."""
    weight, x = np.full((4, 64), 127, np.float32), np.full((1, 1, 64), 127, np.float32)
    found = product(tmp_path, "w8a8", weight)(x)
    np.testing.assert_allclose(found, 127 * 127 * 64, rtol=1e-5)
    np.testing.assert_allclose(product(tmp_path, "w8a8", -weight)(x), -127 * 127 * 64, rtol=1e-5)


def test_a_sources_4_bit_grid_is_kept_exactly(tmp_path):
    """w4 rounds nothing that its source has rounded already; the product is that of the decoded weight."""
    packed, weight = grid(48, 128)
    x = matrix(4, 128, 1)[None]
    found = product(tmp_path, "w4", weight, packed)(x)
    np.testing.assert_allclose(found, x @ weight.T, rtol=1e-4, atol=1e-3)
    assert relative_error(found, x @ weight.T) < 1e-5


def test_a_block_without_spread_keeps_its_zeros(tmp_path):
    """A grid block of scale and minimum 0 stands for zeros, not for a division by zero."""
    packed, _ = grid(48, 64)
    packed.scales[:, 0] = packed.minimums[:, 0] = 0
    packed.values[:, :BLOCK] = 0
    weight = packed.values * packed.scales.repeat(BLOCK, axis=1) + packed.minimums.repeat(BLOCK, axis=1)
    x = matrix(2, 64, 1)[None]
    assert relative_error(product(tmp_path, "w4", weight, packed)(x), x @ weight.T) < 1e-5


def test_what_a_source_kept_finer_stays_finer(tmp_path):
    """Where the source has 4-bit grids, a weight of it without one keeps 8 bits, and so does the head."""
    weight, x = matrix(48, 64), matrix(4, 64, 1)[None]
    for name, rounds in (("o", False), ("head", True), ("head", False)):
        found = product(tmp_path, "w4", weight, name=name, rounds_to_4_bits=rounds)(x)
        assert relative_error(found, x @ weight.T) < 0.02


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_weight_that_says_nothing_is_refused(tmp_path, quantization):
    """Nothing but zeros: refused by the weight's name."""
    with pytest.raises(CheckpointError, match=r"weight layers\.1\.o is all zero"):
        product(tmp_path, quantization, np.zeros((8, 32), np.float32), name="layers.1.o")


def even_rows(count, columns, seed):
    """Rows of a root mean square of 1."""
    rows = matrix(count, columns, seed)
    return rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True))


def test_even_rows_need_no_scale_of_their_own(tmp_path):
    """With one scale for all, rows are as near as with their own, and alone the same; zeros stay zeros."""
    weight, x = matrix(48, 256), even_rows(6, 256, 3)[None]
    run = product(tmp_path, "w8a8", weight, is_even=True)
    found = run(x)
    assert relative_error(found, x @ weight.T) < 0.02
    np.testing.assert_array_equal(run(x[:, 2:3])[0, 0], found[0, 2])
    assert not run(np.zeros_like(x)).any()


def test_an_even_row_is_cut_where_it_is_not(tmp_path):
    """A value beyond what an even row may hold is cut, never wrapped to the other sign."""
    weight, x = np.eye(4, 64, dtype=np.float32), np.zeros((1, 1, 64), np.float32)
    x[0, 0, :3] = [8, -8, 2]
    found = product(tmp_path, "w8a8", weight, is_even=True)(x)[0, 0]
    np.testing.assert_allclose(found, [EVEN_MAX, -EVEN_MAX, 2, 0], atol=2 * EVEN_MAX / 127)


@pytest.mark.parametrize("width", [1536, 160, 97])
def test_the_graph_mixes_as_the_weights_are_mixed(tmp_path, width):
    """A row mixed in the graph is the rotation's own, but for the signs; it is the same bits in any company."""
    rotation = Rotation(width, left_max=LEFT_MAX)
    writer = GraphWriter(tmp_path)
    writer.input("x", TensorProto.FLOAT, ["rows", "tokens", width])
    products = Products(writer, "w8a8", rounds_to_4_bits=True)
    with closing(writer):
        writer.output(products.mix("x", rotation), TensorProto.FLOAT, ["rows", "tokens", width])
        writer.save({})
    run, x = load(tmp_path), matrix(6, width).reshape(3, 2, width)
    np.testing.assert_allclose(run(x), rotation.mix(x * rotation.signs), atol=1e-5)
    np.testing.assert_array_equal(run(x[1:2, 1:])[0, 0], run(x)[1, 1])


@pytest.mark.parametrize("quantization", ROUNDED)
def test_an_outlier_spoils_no_more_than_its_own_row(tmp_path, quantization):
    """A weight a thousand times its neighbours costs its output channel precision, and no other."""
    weight, x = matrix(16, 64), matrix(4, 64, 1)[None]
    plain = product(tmp_path, quantization, weight)(x)
    weight[5, 7] = 1000
    found = product(tmp_path, quantization, weight)(x)
    others = [row for row in range(16) if row != 5]
    np.testing.assert_array_equal(found[..., others], plain[..., others])
    assert relative_error(found[..., 5], (x @ weight.T)[..., 5]) < 0.02


def test_shared_inputs_are_quantised_once(tmp_path):
    """Products of one input share its rounded rows: their nodes are there a single time."""
    writer = GraphWriter(tmp_path)
    products = Products(writer, "w8a8", rounds_to_4_bits=True)
    for name in ("gate", "up"):
        products.add(name, "x", matrix(8, 32))
    products.add("o", "y", matrix(8, 32))
    writer.close()
    kinds = [node.op_type for node in writer._nodes]
    assert (kinds.count("QuantizeLinear"), kinds.count("MatMulIntegerToFloat")) == (2, 3)
    assert kinds.count("ConstantOfShape") == 1
