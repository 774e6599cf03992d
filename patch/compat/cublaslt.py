"""An fp8 matrix product that accumulates into a float32 matrix, by the cuBLASLt that torch has loaded.

torch's `scaled_mm` writes a new matrix (aten/src/ATen/cuda/CUDABlas.cpp, scaled_gemm: beta is 0), and its
`addmm` takes no fp8 factors. Delete when torch has an fp8 product that accumulates into an existing matrix.

cuBLAS has column-major matrices: our [O, I] is its [I, O], and the second factor comes first. Its fp8 factors
have the contracted dimension first ("TN"), so last in our memory.

Constants are from cublasLt.h, cublas_api.h and library_types.h of CUDA 12 and 13. Descriptors lie in our own
memory, as those headers' Init functions allow, so that nothing has to be destroyed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any

import torch

from patch.fp8 import Fp8Matrix
from patch.logger import get_logger

_logger = get_logger(__name__)

_FLOAT32 = 0
_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_SUM_IN_FLOAT32, _TRANSPOSED = 68, 1
"""CUBLAS_COMPUTE_32F without fast accumulation, which is off in a new descriptor; CUBLAS_OP_T."""
_TRANSPOSE_OF_FIRST, _SCALE_OF_FIRST, _SCALE_OF_SECOND = 3, 17, 18
"""Attributes of a product: an int32, and pointers to a float32 on the device."""
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
"""Preferences for an algorithm: a uint64, and uint32 of A, B, C and D, in bytes."""
_MOST_WORKSPACE = 32 * 2**20
"""NVIDIA's recommendation for Hopper."""
_ALIGNMENT = 16
"""The least alignment of all pointers, in bytes."""
_CURE = "set --gradient-accumulation-fusion false"
_SIGNATURES = {
    "cublasLtMatmulDescInit_internal": (c_void_p, c_size_t, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutInit_internal": (c_void_p, c_size_t, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceInit_internal": (c_void_p, c_size_t),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL:
    # A loaded library is found by its name.
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or 'none').split('.')[0]}")
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    library.cublasLtGetStatusName.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        why = _library().cublasLtGetStatusName(status).decode()
        raise RuntimeError(f"{name}: {why}, expected success; {_CURE}")


def _made(what: str, num_words: int, *arguments: int) -> ctypes.Array[c_uint64]:
    """Return a descriptor with the size of the header's opaque structure."""
    memory = (c_uint64 * num_words)()
    _call(f"cublasLt{what}Init_internal", memory, ctypes.sizeof(memory), *arguments)
    return memory


def _set(what: str, descriptor: ctypes.Array[c_uint64], attribute: int, value: Any) -> None:
    pointer, size = ctypes.byref(value), ctypes.sizeof(value)
    _call(f"cublasLt{what}SetAttribute", descriptor, attribute, pointer, size)


class _Product:
    """A product's description, the same for all matrices of equal sizes and dtypes."""

    def __init__(
        self, sizes: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype], alignment: int
    ) -> None:
        outputs, inputs, contracted = sizes
        self._work = _made("MatmulDesc", 32, _SUM_IN_FLOAT32, _FLOAT32)
        _set("MatmulDesc", self._work, _TRANSPOSE_OF_FIRST, c_int(_TRANSPOSED))
        first = _made("MatrixLayout", 8, _TYPES[types[1]], contracted, inputs, contracted)
        second = _made("MatrixLayout", 8, _TYPES[types[0]], contracted, outputs, contracted)
        self._layouts = first, second, _made("MatrixLayout", 8, _FLOAT32, inputs, outputs, inputs)
        self._wishes = _made("MatmulPreference", 8)
        _set("MatmulPreference", self._wishes, _WORKSPACE, c_uint64(_MOST_WORKSPACE))
        for attribute in _ALIGNMENTS:
            _set("MatmulPreference", self._wishes, attribute, ctypes.c_uint32(alignment))
        self._found: _Algorithm | None = None

    def add(self, total: torch.Tensor, a: Fp8Matrix, b: Fp8Matrix, beta: float) -> None:
        for attribute, factor in ((_SCALE_OF_FIRST, b), (_SCALE_OF_SECOND, a)):
            _set("MatmulDesc", self._work, attribute, c_void_p(factor.scale_inv.data_ptr()))
        first, second, result = self._layouts
        # By its documentation, a cuBLAS handle is also a cuBLASLt handle.
        handle = torch.cuda.current_blas_handle()
        if self._found is None:
            self._found = self._ask(handle)
        workspace = total.new_empty(self._found.workspace, dtype=torch.uint8)
        _call(
            "cublasLtMatmul", handle, self._work, ctypes.byref(c_float(1.0)), b.values.data_ptr(), first,
            a.values.data_ptr(), second, ctypes.byref(c_float(beta)), total.data_ptr(), result,
            total.data_ptr(), result, ctypes.byref(self._found), workspace.data_ptr(), workspace.nbytes,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def _ask(self, handle: int) -> _Algorithm:
        first, second, result = self._layouts
        found, number = _Algorithm(), c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic", handle, self._work, first, second, result, result, self._wishes,
            1, ctypes.byref(found), ctypes.byref(number),
        )  # fmt: skip
        if not number.value or found.state:
            raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic found none, state {found.state}; {_CURE}")
        return found


@lru_cache(maxsize=256)
def _product_of(device: torch.device, *key: Any) -> _Product:
    return _Product(*key)


def add_product(total: torch.Tensor, a: Fp8Matrix, b: Fp8Matrix, *, overwrite: bool) -> None:
    """Compute total = total + a @ b.T, accumulated in float32; one thread per device at a time may call it.

    Args:
        total: float32 [O, I], contiguous; I is a multiple of 4.
        a: [O, M], M a multiple of 16; one scale.
        b: [I, M]; one scale. Only one of `a` and `b` may be e5m2.
        overwrite: compute total = a @ b.T instead.
    Raises:
        RuntimeError: the library refuses, with the name of its status.
    """
    sizes = (*total.shape, a.values.shape[1])
    places = total.data_ptr() | a.values.data_ptr() | b.values.data_ptr()
    alignment = min(places & -places, 256)
    if alignment < _ALIGNMENT:
        raise RuntimeError(f"memory is aligned to {alignment} bytes, expected {_ALIGNMENT}; {_CURE}")
    with torch.cuda.device(total.device):
        made = _product_of(total.device, sizes, (a.values.dtype, b.values.dtype), alignment)
        made.add(total, a, b, 0.0 if overwrite else 1.0)


@cache
def obstacle(device: torch.device, kind: torch.dtype) -> str:
    """Return why this device and its library cannot do it, or "" if they can; a small product is tried.

    Args:
        kind: dtype of the first factor.
    """
    numbers = torch.arange(48.0 * 16, device=device).view(48, 16)
    a, b = numbers[:32] % 5, numbers % 3
    scale, total = torch.full((), 0.5, device=device), a.new_full((32, 48), torch.nan)
    factors = Fp8Matrix(a.to(kind), scale), Fp8Matrix(b.to(torch.float8_e4m3fn), scale.clone())
    try:
        for overwrite in (True, False):
            add_product(total, *factors, overwrite=overwrite)
        why = "" if torch.equal(total, a @ b.t() * 0.5) else "the test product has wrong values"
    except torch.OutOfMemoryError:  # says nothing of the library
        raise
    except (AttributeError, OSError, RuntimeError) as error:
        why = str(error)
    if why:
        _logger.warning(
            "fp8 weight gradients are rounded before accumulation: cuBLASLt cannot accumulate them here: %s",
            why,
        )
    return why
