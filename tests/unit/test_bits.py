"""Tensors as bits: nothing is lost on the way, nothing unknown gets in."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rose.weights.bits import Bits, UnsupportedTensor, as_bits, as_state


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<i8", "|u1", "|b1"])
def test_numpy_arrays_keep_their_values_and_shape(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype).T
    bits = as_bits(array)
    assert bits.shape == (4, 3)
    assert np.array_equal(bits.words.view(array.dtype.newbyteorder("<")).reshape(4, 3), array)


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "bool", "int64"]
)
def test_torch_tensors_keep_their_bits(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, name)).t()
    bits = as_bits(tensor)
    again = torch.from_numpy(bits.words.view(np.uint8).copy()).view(tensor.dtype).reshape(4, 3)
    assert bits.shape == (4, 3)
    assert torch.equal(again.float(), tensor.float())


def test_a_parameter_that_needs_grad_and_a_scalar_are_fine() -> None:
    torch = pytest.importorskip("torch")
    assert as_bits(torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))).words.tolist() == [0x3F80] * 3
    assert as_bits(torch.tensor(-0.0, dtype=torch.bfloat16)).words.tolist() == [0x8000]


@pytest.mark.parametrize("value", [[1.0], None, "w", np.zeros(2, np.complex64), np.zeros(2, "datetime64[s]")])
def test_what_is_no_tensor_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedTensor, match=r"^layer\.weight: "):
        as_state({"layer.weight": value})


def test_sparse_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UnsupportedTensor):
        as_bits(torch.zeros(3).to_sparse())


def test_words_must_fit_dtype_and_shape() -> None:
    with pytest.raises(UnsupportedTensor):
        Bits("BF16", (3,), np.zeros(2, np.uint16))
    with pytest.raises(UnsupportedTensor):
        Bits("BF16", (3,), np.zeros(3, np.uint32))
    with pytest.raises(UnsupportedTensor):
        Bits("F4", (3,), np.zeros(3, np.uint8))


def test_the_package_loads_neither_torch_nor_an_http_client() -> None:
    code = "import sys, rose.weights.store; print({'torch', 'aiohttp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
