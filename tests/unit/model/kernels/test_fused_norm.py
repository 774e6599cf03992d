"""RMSNorm in Triton: its interpreter against torch, in a layer with a residual, and what a GPU would run."""

import gc
import re
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_runner import run_distributed
from small_runs import ZERO_3, small_run
from torch.utils.checkpoint import checkpoint
from training_runs import train
from triton_interpreter import interpreted, output_of_compiler, rounding

from patch.amax import largest_of, noted_amax
from patch.model import llama
from patch.model.backends import backends_on
from patch.model.norm import AmaxRMSNorm, FusedRMSNorm, ResidualAdd, RMSNorm

pytest.importorskip("triton.language", reason="Triton is not installed: pip install triton")

MODULE = "patch.model.kernels.fused_norm"
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
"""Of norms of tensors: another order of sums, and two roundings to bf16."""
RUN_BOUND = 1e-5
"""Of losses and gradient norms in fp32: other sums in four layers, and one update."""


def config_of(dtype: torch.dtype, is_centered: bool) -> Any:
    return SimpleNamespace(
        use_cpu_initialization=True, layernorm_zero_centered_gamma=is_centered, params_dtype=dtype,
        sequence_parallel=False, tensor_model_parallel_size=1,
    )  # fmt: skip


def layer(norm: torch.nn.Module, add: ResidualAdd, hidden: torch.Tensor) -> torch.Tensor:
    """Two parts of megatron-core's layer, by the same names of the same tensors."""
    for _ in range(2):
        residual = hidden
        hidden = add(True, False)((torch.tanh(norm(hidden)), None), residual, 0.0)
    return hidden


def gradients(
    norm: RMSNorm, add: ResidualAdd, hidden: torch.Tensor, *, is_recomputed: bool = False
) -> list[torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden.dtype)
    compute = partial(checkpoint, layer, use_reentrant=False) if is_recomputed else layer
    out = compute(norm, add, hidden * 1.0)
    return [out.detach(), *torch.autograd.grad((out * direction).sum(), [hidden, norm.weight])]


@pytest.mark.parametrize(
    ("dtype", "width", "is_centered"), [(torch.float32, 65, True), (torch.bfloat16, 64, False)]
)
def test_a_layer_is_that_of_torch(dtype: torch.dtype, width: int, is_centered: bool) -> None:
    """Also if it is recomputed. Some programs of backward have several rows."""
    torch.manual_seed(0)
    config = config_of(dtype, is_centered)
    ours, theirs = FusedRMSNorm(config, width), RMSNorm(config_of(torch.float64, is_centered), width)
    torch.nn.init.normal_(ours.weight, 1.0, 0.5)
    theirs.weight.data.copy_(ours.weight)
    hidden, add = torch.randn(5, 2, width).to(dtype), ResidualAdd(config, None, 1.0)
    with interpreted(MODULE, rounding) as module:
        module._PROGRAMS = 4  # type: ignore[attr-defined]
        found = gradients(ours, add, hidden)
        again = gradients(ours, add, hidden, is_recomputed=True)
    assert all(map(torch.equal, found, again))
    for mine, exact in zip(found, gradients(theirs, add, hidden.double()), strict=True):
        assert mine.dtype is dtype and (mine - exact).norm() <= BOUNDS[dtype] * exact.norm()


def test_the_kernel_notes_the_largest_value_and_a_forward_alone_leaves_no_memory() -> None:
    config = config_of(torch.bfloat16, False)
    norm, add = AmaxRMSNorm(config, 64), ResidualAdd(config, None, 1.0)
    with interpreted(MODULE, rounding):
        hidden = torch.randn(9, 1, 64).bfloat16().requires_grad_() * 1.0
        normed = norm(hidden)
        noted = noted_amax(normed)
        assert noted is not None and torch.equal(noted, largest_of(normed))
        out = add(True, False)((normed, None), hidden, 0.0)
        assert {node.name() for node, _ in out.grad_fn.next_functions} == {"NormAndResidualBackward"}
        left, again = weakref.ref(hidden), norm(hidden)
        del hidden, normed, out, again
        gc.collect()
        assert left() is None


def train_both(rank: int, world_size: int) -> None:
    for changes in ({}, {"recompute_granularity": "full"}, {"cpu_offloading": True}, ZERO_3):
        config = small_run(dp=world_size, train_iters=2, **changes)
        expected = train(config)
        with pytest.MonkeyPatch.context() as patch, interpreted(MODULE, rounding):
            patch.setattr(
                llama, "backends_on", lambda *given: replace(backends_on(*given), is_norm_fused=True)
            )
            found = train(config)
        assert found != expected, "the kernel was not used"
        for ours, theirs in zip(found, expected, strict=True):
            for number, other in ((ours.loss, theirs.loss), (ours.grad_norm, theirs.grad_norm)):
                assert number == pytest.approx(other, rel=RUN_BOUND), changes


@pytest.mark.long
def test_runs_with_the_kernel_train_like_runs_without_it() -> None:
    run_distributed(train_both, 2)


COMPILE = """
import subprocess
from tempfile import NamedTemporaryFile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from patch.features.backends import _LARGEST_NORM
from patch.model.kernels import fused_norm

KINDS = dict.fromkeys(("factors", "of_weight"), "*fp32") | dict.fromkeys(("rows", "width"), "i32")
KINDS |= {"amax": "*i32", "eps": "fp32", "is_centered": "constexpr", "block": "constexpr"}
for name in ("_norm", "_norm_backward"):
    kernel, sizes = getattr(fused_norm, name), fused_norm._sizes(_LARGEST_NORM)
    signature = {each: KINDS.get(each, "*bf16") for each in kernel.arg_names}
    aligned = [i for i, kind in enumerate(signature.values()) if kind[0] == "*" or kind == "i32"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    constants = {"is_centered": False, "block": sizes.pop("block")}
    source = ASTSource(fn=kernel, signature=signature, attrs=attributes, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=sizes).asm
    print(name, code["ptx"], flush=True)
    with NamedTemporaryFile() as file:
        file.write(code["cubin"])
        file.flush()
        subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], check=True)
"""


def test_compiled_for_a_hopper_gpu_loads_are_wide_and_nothing_is_spilled() -> None:
    """At the longest row."""
    parts = re.split(r"^(_norm\w*) ", output_of_compiler(COMPILE), flags=re.MULTILINE)[1:]
    assert len(parts) == 2 * 2
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        assert "ld.global.v4" in code and "st.global.v4" in code, name
        assert re.search(r"STACK:0 .*LOCAL:0 ", code), name
