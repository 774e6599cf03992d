"""Which kernels a run gets: by GPU, libraries and settings; what is refused; what plan and log say."""

import dataclasses
from typing import Any

import pytest

from patch.device import GPU_LIBRARIES, MachineFacts, installed_libraries
from patch.errors import ConfigError
from patch.features.backends import Backends, choose_backends, resolve_transformer_impl
from patch.plan.describe import describe_plan
from patch.preflight.validate import validate_run

GPUS = MachineFacts(2, 2, compute_capability=(9, 0), libraries=frozenset({"triton"}))
AMPERE = dataclasses.replace(GPUS, compute_capability=(8, 0))
FA3 = dataclasses.replace(GPUS, libraries=frozenset({"triton", "flash_attn_3"}))
ALL = dataclasses.replace(GPUS, libraries=frozenset(GPU_LIBRARIES))
AMPERE_2, HOPPER_2, BLACKWELL_4 = (
    MachineFacts(2, 2, compute_capability=capability, libraries=frozenset({"triton", library}))
    for capability, library in (((8, 0), "flash_attn"), ((9, 0), "flash_attn"), ((10, 0), "flash_attn_4"))
)
LAST = ("efficient", "math")


def backends(command: Any, machine: MachineFacts, *flags: str, **positions: str) -> Backends:
    config = command.parse(*flags, **{"PR": "bf16", **positions}).config
    return choose_backends(config, machine)


@pytest.mark.parametrize(
    ("machine", "wishes", "order"),
    [
        (GPUS, "auto flash", ("cudnn", "flash", *LAST)),
        (FA3, "auto flash", ("flash", "cudnn", *LAST)),
        (FA3, "fused local", ("cudnn", "flash", *LAST)),
        (AMPERE, "auto flash", ("flash", "cudnn", *LAST)),
        (AMPERE, "fused", ("cudnn", "flash", *LAST)),
        (AMPERE_2, "auto flash", ("flash_attn", "flash", "cudnn", *LAST)),
        (AMPERE_2, "local", ("flash", "cudnn", *LAST)),
        (HOPPER_2, "auto flash fused", ("cudnn", "flash_attn", "flash", *LAST)),
        (BLACKWELL_4, "auto", ("flash", "cudnn", *LAST)),
        (FA3, "unfused", ("math",)),
    ],
)
def test_order_of_attention_kernels(command, machine, wishes, order):
    """With --deterministic-mode never cuDNN."""
    for wish in wishes.split():
        assert backends(command, machine, f"--attention-backend={wish}").attention == order
        found = backends(command, machine, f"--attention-backend={wish}", "--deterministic-mode")
        without = tuple(kernel for kernel in order if kernel != "cudnn")
        assert found.attention == without


def test_a_kernel_that_does_not_work_is_not_in_the_order_nor_in_the_table(command):
    config = command.parse(PR="bf16").config
    found = choose_backends(config, GPUS, faulty=("cudnn",))
    assert found.attention == ("flash", *LAST) and "cuDNN" not in found.line


def test_flash_attention_3_and_kernels_of_triton_are_taken_where_they_are(command):
    bare, ampere = (dataclasses.replace(FA3, **change) for change in (
        {"libraries": frozenset()}, {"compute_capability": (8, 0)}
    ))  # fmt: skip
    for machine, flags, expected in (
        (FA3, [], (True, True)),
        (FA3, ["--attention-backend=local"], (False, True)),
        (GPUS, [], (False, True)),
        (ampere, [], (False, True)),
        (bare, [], (False, False)),
        (command.machine, [], (False, False)),
        (FA3, ["--precision-align=sdpa"], (False, False)),
        (GPUS, ["--precision-align=eager"], (False, False)),
    ):
        found = backends(command, machine, *flags)
        assert (found.flash == "FA3", found.is_fused) == expected, flags


@pytest.mark.parametrize(
    ("machine", "flags", "parts"),
    [
        (GPUS, [], ["attention cuDNN, else FlashAttention-2 (flash-attn 3 is not installed)"]),
        (FA3, ["--attention-backend=auto"], ["attention FlashAttention-3, else cuDNN;"]),
        (
            AMPERE,
            ["--context-parallel-size=2", "--cp-comm-type=p2p"],
            ["attention FlashAttention-2, else memory-efficient SDPA;"],
        ),
        (FA3, [], ["attention FlashAttention-3, else cuDNN; packed rows and windows torch's varlen_attn"]),
        (AMPERE_2, [], ["attention the package flash-attn 2, else FlashAttention-2; packed rows and"]),
        (
            AMPERE_2,
            ["--context-parallel-size=2", "--cp-comm-type=p2p"],
            ["attention FlashAttention-2, else"],
        ),
        (BLACKWELL_4, [], ["attention FlashAttention-4, else cuDNN;"]),
        (FA3, ["--deterministic-mode"], ["FlashAttention-3, else", "(cuDNN is not deterministic)"]),
        (GPUS, [], ["norm Triton before attention and MLP, else torch's rms_norm; RoPE one Triton kernel"]),
        (GPUS, ["--recompute-granularity=selective"], ["norm torch's rms_norm;", "SwiGLU one Triton kernel"]),
        (GPUS, [], ["products torch (Transformer Engine is not installed)", "optimizer Triton"]),
        (GPUS, ["--precision-align=eager"], ["transformers' operations (--precision-align)"]),
        (
            dataclasses.replace(GPUS, libraries=frozenset()),
            [],
            ["RoPE torch operations (Triton is not installed)"],
        ),
    ],
)
def test_the_plan_says_what_serves_what_and_why_not_another(command, machine, flags, parts):
    config, _ = resolve_transformer_impl(command.parse(*flags, PR="bf16", FL="true").config, machine)
    (line,) = [line for line in describe_plan(config, machine).splitlines() if line.startswith("kernels")]
    for part in parts:
        assert part in line
    assert "kernels" not in describe_plan(config, command.machine)


def test_transformer_engine_is_taken_where_it_is_installed(command):
    for precision, flags in (("bf16", []), ("fp8", []), ("fp8", ["--fp8-recipe=delayed"])):
        config = command.parse(*flags, PR=precision, FL="true").config
        assert validate_run(config, ALL) == []
        resolved, lines = resolve_transformer_impl(config, ALL)
        assert (resolved.model.transformer_impl, lines) == ("transformer_engine", [])
        assert "attention Transformer Engine;" in choose_backends(resolved, ALL).line
    mixed = command.parse("--fp8-recipe=delayed", "--first-last-layers-bf16", PR="fp8", FL="true").config
    with pytest.raises(ConfigError, match="delayed scaling has no layers in bf16"):
        validate_run(mixed, ALL)


def test_libraries_are_found_without_importing_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn_interface", "flash_attn_2_cuda", "transformer_engine", "triton"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    found = installed_libraries()
    assert {"flash_attn", "flash_attn_3", "triton"} <= found
    (tmp_path / "transformer_engine_torch-2.dist-info").mkdir()
    (tmp_path / "transformer_engine_torch-2.dist-info" / "METADATA").write_text("Name: x\nVersion: 2\n")
    assert installed_libraries() == found | {"transformer_engine"}
