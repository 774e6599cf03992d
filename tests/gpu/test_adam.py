"""The Triton kernel on a GPU against the NumPy oracle on the CPU, to the bit."""

import pytest
import torch
from adam_cases import FORMS, SIZES, assert_equal, bits_after, make_segments, scalars

from patch.optimizer.kernels import adam_kernel
from patch.optimizer.kernels.numpy_adam import NumpyAdam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("sizes", [SIZES, (1 << 16,)], ids=["odd", "aligned"])
@pytest.mark.parametrize("is_decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_triton_equals_the_oracle(form, grad_dtype, is_decoupled, sizes):
    for seed, scale in enumerate((1e-30, 1e-3, 1e12)):
        step = scalars(step=10**seed, is_decoupled=is_decoupled)
        changes = {"seed": seed, "scale": scale, "sizes": sizes, "is_shadowed": seed == 1}
        ours = make_segments(form, grad_dtype, device="cuda", **changes)
        expected = make_segments(form, grad_dtype, **changes)
        kernel = adam_kernel(torch.device("cuda"))
        assert_equal(bits_after(kernel, ours, step), bits_after(NumpyAdam(), expected, step))
