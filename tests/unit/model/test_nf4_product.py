"""Weights in 4 bits are those of bitsandbytes; a product keeps nothing dense.

The QLoRA paper's own levels (nf4_oracle.py) are the oracle of training/test_nf4_product.py.
"""

import pytest
import torch

from patch.model.nf4_product import Nf4Product, dense_shape, dequantize, quantize, scale_table

REASON = "bitsandbytes is not installed: make test installs it"
TYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLUMNS = 130, 192


def random_weight(dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3, 64:128], weight[4, 5] = 0, -9
    return weight


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_are_those_of_bitsandbytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes", reason=REASON).functional
    monkeypatch.setattr("patch.model.nf4_product._PIECE", 7 * COLUMNS)
    weight = random_weight(dtype)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    packed = quantize(weight)
    assert dense_shape(packed) == weight.shape and packed.nbytes == weight.numel() * 9 // 16
    ours, scales = (part.contiguous() for part in packed.split([COLUMNS // 2, COLUMNS // 16], 1))
    assert torch.equal(ours.view(-1, 1), codes)
    assert torch.equal(scales.view(torch.float32).flatten(), state.absmax)
    assert torch.equal(dequantize(packed, dtype), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("blocks", [1, 3, 85, 700])
def test_scales_in_8_bits_are_those_of_bitsandbytes(dtype: torch.dtype, blocks: int) -> None:
    functional = pytest.importorskip("bitsandbytes", reason=REASON).functional
    rows, columns = 2100 // blocks, 64 * blocks
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(blocks)).to(dtype)
    codes, plain = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    _, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    # Its kernel for CPUs looks up a coarse table; the one for any device takes the nearest code, as on GPUs.
    any_device = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    quantize_blockwise = torch.ops.bitsandbytes.quantize_blockwise.default
    state.absmax, state.state2.absmax = quantize_blockwise.redispatch(
        any_device, plain.absmax - state.offset, functional.create_dynamic_map(), 256
    )
    table = scale_table(weight)
    packed = quantize(weight, table)
    assert dense_shape(packed) == weight.shape
    assert torch.equal(packed[:, : columns // 2].view(torch.uint8).reshape(-1, 1), codes)
    assert torch.equal(packed[:, columns // 2 :][:, :blocks].view(torch.uint8).flatten(), state.absmax)
    assert torch.equal(dequantize(packed, dtype), functional.dequantize_4bit(codes, state))
    half = slice(columns // 128 * 64, columns)  # a shard
    part = quantize(weight[1:, half], table[1:, half.start // 16 :])
    assert torch.equal(dequantize(part, dtype), dequantize(packed, dtype)[1:, half])


def test_product_and_gradient_are_those_of_the_dense_weight_and_nothing_dense_is_kept() -> None:
    parameter = torch.nn.Parameter(random_weight(torch.float32))
    packed = quantize(parameter.detach())
    product = Nf4Product("nf4").of(parameter)
    assert parameter.nbytes == packed.nbytes
    parameter.copy_(packed)
    input, plain = (torch.ones(5, 2, COLUMNS).cumsum(0).requires_grad_() for _ in range(2))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        output = product(input, parameter)
    expected = plain @ dequantize(packed, torch.float32).t()
    output.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(output, expected) and torch.allclose(input.grad, plain.grad, rtol=1e-6)
    assert [tensor.dtype for tensor in kept] == [torch.uint8]
