"""Calls the C++ kernel through ctypes: on all cores of this process, and without the GIL."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache

import numpy as np
import torch

from patch.optimizer.kernels.build import BuildError, find_or_build
from patch.optimizer.kernels.low_bit_moments import buckets, codes
from patch.optimizer.kernels.spec import AdamKernel, UpdateItem, check_item, copy_other_params

INSTRUCTION_SETS = ("default", "avx2", "avx512")


class _Scalars(ctypes.Structure):
    """The struct `Scalars` of adam.cpp."""

    _fields_ = [("constants", c_float * 9), ("is_decoupled", c_int32)]


class _Draw(ctypes.Structure):
    """The struct `Draw` of adam.cpp."""

    _fields_ = [("places", c_int64 * 4), ("keys", c_uint32 * 2)]


class _Tables(ctypes.Structure):
    """The struct `Tables` of adam.cpp."""

    _fields_ = [("codes", c_void_p * 2), ("buckets", c_void_p * 2)]


class _UpdateItem(ctypes.Structure):
    """The struct `UpdateItem` of adam.cpp."""

    _fields_ = [
        ("pointers", c_void_p * 13),
        ("kinds", c_int32 * 2),
        ("draw", _Draw),
        ("numel", c_int64),
        ("has_bf16_grad", c_int32),
        ("is_split", c_int32),
        ("scalars", _Scalars),
    ]


class _SquaresItem(ctypes.Structure):
    """The struct `SquaresItem` of adam.cpp."""

    _fields_ = [("values", c_void_p), ("numel", c_int64), ("are_bf16", c_int32)]


@cache
def load() -> ctypes.CDLL:
    """Return the library, built if needed, or raise BuildError."""
    try:
        library = ctypes.CDLL(str(find_or_build()))
    except OSError as reason:
        raise BuildError(str(reason)) from reason
    library.adam_update.argtypes = [POINTER(_UpdateItem), c_int64, c_int32, c_int32]
    library.adam_update.restype = None
    library.adam_best_instruction_set.restype = c_int32
    library.sums_of_squares.argtypes = [POINTER(_SquaresItem), c_int64, c_void_p, c_int32, c_int32]
    library.sums_of_squares.restype = None
    both = [codes(signed=signed).ctypes.data for signed in (True, False)]  # cached arrays, never freed
    starts = [half.ctypes.data for half in np.split(buckets(), 2)]
    library.adam_set_tables(byref(_Tables((*both,), (*starts,))))
    return library


class CppAdam(AdamKernel):
    """The C++ kernels on CPU tensors.

    Args:
        num_threads: threads of an update, including the caller's; None: the function `num_threads` decides.
        instruction_set: one of INSTRUCTION_SETS, for tests; None: the best instruction set of this CPU.
    Raises:
        BuildError: there is no compiler, or no folder to build in.
    """

    def __init__(self, num_threads: int | None = None, instruction_set: str | None = None) -> None:
        self._library, self._num_threads = load(), num_threads
        best = self._library.adam_best_instruction_set()
        self._set = best if instruction_set is None else INSTRUCTION_SETS.index(instruction_set)
        assert self._set <= best, f"this CPU has no {instruction_set}"

    def update(self, items: Sequence[UpdateItem]) -> None:
        """See AdamKernel. Calls from several threads run one after another."""
        for item in items:
            check_item(item)
        table = (_UpdateItem * len(items))(*map(_row, items))
        self._library.adam_update(table, len(items), self._threads(), self._set)
        copy_other_params(items)

    def sums_of_squares(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the float64 sum of squares of each contiguous float32 or bfloat16 part: [parts].

        It reads each value once and writes no copy. The bits do not depend on the number of threads.
        """
        assert all(part.is_contiguous() for part in parts), "a kernel takes contiguous tensors"
        assert {part.dtype for part in parts} <= {torch.float32, torch.bfloat16}, "gradients of other types"
        sums = torch.empty(len(parts), dtype=torch.float64)
        rows = [_SquaresItem(part.data_ptr(), part.numel(), part.dtype == torch.bfloat16) for part in parts]
        table = (_SquaresItem * len(parts))(*rows)
        self._library.sums_of_squares(table, len(parts), sums.data_ptr(), self._threads(), self._set)
        return sums

    def _threads(self) -> int:
        return self._num_threads or num_threads(beside_gpu=torch.cuda.is_initialized())


def num_threads(*, beside_gpu: bool) -> int:
    """Return the threads of an update: torch's number of threads, at most the cores of this process.

    `beside_gpu` leaves a core to the thread that launches GPU kernels, because otherwise the GPU waits.
    """
    usable = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    return max(1, usable - 1 if beside_gpu else usable)


def _row(item: UpdateItem) -> _UpdateItem:
    has_bf16_grad, numbers = item.grad.dtype == torch.bfloat16, item.rng_numbers
    scalars = _Scalars(item.constants, item.scalars.decoupled_weight_decay)
    draw = _Draw(numbers[:4], numbers[4:])
    return _UpdateItem(
        (*item.pointers,), item.moment_kinds, draw, item.grad.numel(), has_bf16_grad, item.is_split, scalars
    )
