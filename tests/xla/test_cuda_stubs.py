"""The stubs of CUDA libraries, loaded as torch loads them."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from tests.xla import cuda_stubs

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_calls_answer_with_a_number_and_texts_of_errors_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "libcudart.so.12"
    texts = ["cudaGetErrorString", "cudaGetErrorName", "ncclGetErrorString", "cudnnGetLastErrorString"]
    given = ["cuptiGetResultString", "cuGetErrorString"]
    cuda_stubs.make(path, ["cudaGetDeviceCount", *texts, *given], path.name)
    library = ctypes.CDLL(str(path))
    assert library.cudaGetDeviceCount() == 100
    for name in texts:
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
        assert function(100) == b"no device", "torch would read from address 100"
    for name in given:
        pointer = ctypes.c_char_p()
        assert getattr(library, name)(100, ctypes.byref(pointer)) == 0 and pointer.value == b"no device"
