"""The formulas of the documents: parameters, activations, FLOPs, states and buffers of a GPT of width h.

The documents' layer has a GELU of width 4 h, dropout, and attention without a fused kernel. A LLaMA layer
with as many parameters has SwiGLU of width 8 h / 3; what else differs is taken off in the test by name.
"""

import pytest
from planned_runs import planned_run

from patch.config import RunConfig
from patch.plan.activations import activation_bytes
from patch.plan.flops import flops_per_step
from patch.plan.memory import bytes_per_rank, staging_bytes
from patch.plan.parameters import layer_matrices, total_parameters

B, S, L, H, A, V = 8, 2048, 24, 3072, 24, 51200


def gpt(*flags: str, **kind) -> RunConfig:
    """A LLaMA with the shape of a GPT of about 3 G parameters."""
    shape = (
        f"--num-layers {L} --hidden-size {H} --ffn-hidden-size {8 * H // 3} --num-attention-heads {A} "
        f"--num-query-groups {A} --kv-channels {H // A} --vocab-size {V} "
        "--untie-embeddings-and-output-weights"
    )
    batch = "" if "--global-batch-size" in " ".join(flags) else f"--global-batch-size {B}"
    return planned_run(size="8B", length=S, flags=f"{shape} {batch} {' '.join(flags)}", **kind)


def test_a_layer_has_12_h2_parameters_besides_its_vectors():
    model = gpt().model
    assert layer_matrices(model) == 12 * H**2
    assert total_parameters(model) == L * (12 * H**2 + 2 * H) + 2 * V * H + H


def test_flops_are_72_bslh2():
    """72 B s l h^2 (1 + s / 6h + V / 12lh): attention counted as whole squares, as the documents do."""
    found = flops_per_step(gpt(), pairs=B * S * S)
    assert found.model == pytest.approx(
        72 * B * S * L * H**2 * (1 + S / (6 * H) + V / (12 * L * H)), rel=1e-12
    )
    causal = flops_per_step(gpt()).model
    assert found.model - causal == pytest.approx(12 * B * L * H * S * (S - 1) / 2)


def test_recomputation_repeats_what_the_documents_say():
    """All layers: 96 instead of 72 of the layers. Attention alone: a forward of it, s / 6h x 4 / 3.

    The document's s / 3h counts all three passes of attention twice; torch's counter (test_flops) says that
    only the forward is repeated.
    """
    full = flops_per_step(gpt("--recompute-granularity full"), pairs=B * S * S)
    of_layers, of_output = 96 * (1 + S / (6 * H)), 6 * V / (L * H)
    assert full.hardware == pytest.approx(B * S * L * H**2 * (of_layers + of_output), rel=1e-12)
    eager = flops_per_step(gpt("--recompute-granularity selective --precision-align eager"), pairs=B * S * S)
    form = [72 * B * S * L * H**2 * (1 + S / H / part + V / (12 * L * H)) for part in (4.5, 3)]
    assert eager.hardware == pytest.approx(form[0], rel=1e-12) and eager.hardware < form[1]


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_activations_are_34_sbh(t, sp):
    """s b h (34 + 5 a s / h), with TP (10 + 24 / t + 5 a s / h t), with SP (34 + 5 a s / h) / t.

    Not kept here: dropout's masks (2 outside of products, and the 5 a s / h of softmax and its dropout, which
    fused attention computes again). Kept besides: float32 sums of norms and of attention.
    """
    config = gpt(*(("--sequence-parallel",) if sp and t > 1 else ()), tp=t)
    found = activation_bytes(config, cuda=True)[None]
    squares = 5 * A * S / H / t
    document = (34 / t if sp else 10 + 24 / t) + squares
    cut = t if sp else 1
    without_masks = document - squares - 2 / cut
    gelu, swiglu = (8 + 8) / t, 3 * 2 * (8 / 3) / t
    expected = S * H * (without_masks - gelu + swiglu) + S * (2 * 4 + 4 * A / t)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("n", [1, 8, 64])
def test_states_are_16_bytes_a_parameter_and_what_each_zero_level_shares(n):
    """2 + 4 + 10 instead of 2 + 2 + 12: a float32 gradient, and half of the master is the weight."""
    psi = total_parameters(gpt().model)
    expected = {
        "none": 2 + 4 + 10,
        "optimizer": 2 + 4 + 10 / n,
        "gradients": 2 + (4 + 10) / n,
    }
    for level, each in expected.items():
        run = gpt(f"--global-batch-size {B * n}", dp=n, sharding=f"--data-parallel-sharding {level}")
        assert bytes_per_rank(run).total == pytest.approx(each * psi, abs=4)


def test_overlap_takes_fewer_buffers_than_the_documents_four_and_a_half_buckets():
    """DeepSpeed: 5e8 x 2 bytes x 2 x 4.5 = 9 GB; here three buckets of float32 gradients."""
    flags = "--reduce-bucket-size 500000000", "--no-gradient-accumulation-fusion"  # without stand-ins
    run = gpt(*flags, dp=8, sharding="--data-parallel-sharding gradients")
    assert staging_bytes(run, 0, cuda=True) == 3 * 4 * 500_000_000 < 5e8 * 2 * 2 * 4.5
