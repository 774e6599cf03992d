"""Costs of a layer's and a stage's passes, by hand and by what they must add up to."""

import pytest
from planned_runs import H100
from planned_runs import planned_run as run

from patch.plan.flops import flops_per_step
from patch.plan.parameters import layer_matrices
from patch.plan.timing.layer_time import layer_products, layer_times, product_seconds
from patch.plan.timing.machine_presets import PRESETS
from patch.plan.timing.step_time import step_costs

LAYER = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_layers_products_are_its_matrices(tp):
    config = run(tp=tp)
    assert sum(n * k for n, k in layer_products(config)) * tp == layer_matrices(config.model) == LAYER


def test_a_large_product_takes_as_long_as_its_flops():
    rate = 989.5e12 * H100.reached.gemm * H100.reached.sustained * 8192 / (8192 + 256)
    found = product_seconds(H100, "bf16", (8192, 8192, 8192), 2)
    assert found == pytest.approx(2 * 8192**3 / rate)
    assert product_seconds(H100, "fp8", (8192, 8192, 8192), 2) < 0.6 * found


def test_a_narrow_product_takes_as_long_as_its_matrices_are_read():
    rate = 3.35e12 * H100.reached.device_bandwidth * H100.reached.sustained
    found = product_seconds(H100, "bf16", (1, 8192, 8192), 2)
    assert found >= 2 * 8192 * 8192 / rate
    big = product_seconds(H100, "bf16", (65536, 128, 65536), 8)
    assert 2 * 65536 * 128 * 65536 / big < 989.5e12 * H100.reached.gemm / 2


def test_attention_by_hand():
    """Causal scores and values of 4096 tokens, 32 heads of width 128, at what FlashAttention reaches."""
    flops = 2 * 2 * 32 * 128 * 4096 * 4097 / 2
    reached = H100.reached.sustained * 4096 / (4096 + 768)
    times = layer_times(run(), H100)
    assert times.forward.attention == pytest.approx(flops / (989.5e12 * reached * 0.65))
    assert times.backward.attention == pytest.approx(2.5 * flops / (989.5e12 * reached * 0.55))


def test_small_models_wait_for_the_host():
    times = layer_times(run(flags="--hidden-size 64 --ffn-hidden-size 128 --kv-channels 2"), H100)
    assert times.forward.total == times.forward.launches == pytest.approx(25 * 10e-6)


def test_recomputation_adds_a_forward_of_each_layer_and_offload_what_copies_take_longer():
    base = step_costs(run(pp=2), H100)
    full = step_costs(run(pp=2, flags="--recompute-granularity full"), H100)
    block = step_costs(
        run(pp=2, flags="--recompute-granularity full --recompute-method block --recompute-num-layers 3"),
        H100,
    )
    forward = base.layer.forward.total
    assert full.forward == base.forward
    for stage in range(2):
        assert full.backward[stage] - base.backward[stage] == pytest.approx(16 * forward)
        assert block.backward[stage] - base.backward[stage] == pytest.approx(3 * forward)
    offload = step_costs(run(flags="--cpu-offloading --cpu-offloading-num-layers 2"), H100)
    assert offload.layer.offload > 0
    assert sum(offload.backward) - sum(step_costs(run(), H100).backward) == pytest.approx(
        2 * offload.layer.offload
    )


def test_the_loss_is_the_last_stages_and_the_embedding_the_first_ones():
    costs = step_costs(run(pp=4), H100)
    of_layers = 8 * costs.layer.forward.total
    assert costs.forward[1] == costs.forward[2] == pytest.approx(of_layers)
    assert costs.forward[3] == pytest.approx(of_layers + costs.loss)
    assert costs.backward[0] == pytest.approx(costs.backward[1] + costs.embedding[1])


@pytest.mark.parametrize(("flags", "exposed"), [("", 4), ("--sequence-parallel", 4)])
def test_forward_of_tensor_parallelism_waits_for_four_messages(flags, exposed):
    """An all-reduce is two of them. 4096 tokens of width 4096 in bf16 over two GPUs of a node."""
    once = 4096 * 4096 * 2 / 2 / (450e9 * H100.reached.node_link) + 3.6e-6
    times = layer_times(run(tp=2, flags=flags), H100)
    assert times.forward.tensor == pytest.approx(exposed * once)
    # Backward hides messages behind weight gradients, except gathers of gradients (SP).
    assert times.backward.tensor == pytest.approx(2 * once if flags else 0)
    overlapped = layer_times(run(tp=2, flags=f"{flags} --tp-comm-overlap"), H100)
    assert overlapped.forward.tensor < 0.6 * times.forward.tensor


def test_a_ring_of_context_parallelism_hides_behind_attention_and_an_exchange_does_not():
    ring = layer_times(run(cp=4, length=65536, flags="--cp-comm-type p2p"), H100)
    assert ring.forward.context == ring.backward.context == 0
    exchange = layer_times(run(cp=4, length=65536, flags="--cp-comm-type a2a"), H100)
    sent = 2 * 16384 * (32 + 8) * 128 * 2 * 3 / 4  # q, k, v and the result in bf16, less what stays
    rate = 450e9 * H100.reached.node_link
    assert exchange.forward.context == pytest.approx(sent / rate + 3 * 3.6e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "length", "flags", "least", "most"),
    [
        ("a100", 4096, "", 0.62, 0.70),  # 212 TFLOP/s are the best of Pai's article
        ("h100", 8192, "", 0.45, 0.52),  # Megatron-Bridge: 45 to 50 %
        ("h100", 8192, "--precision fp8", 0.30, 0.38),  # 744 TFLOP/s
    ],
)
def test_a_pass_of_8b_reaches_what_is_published(name, length, flags, least, most):
    """Forward and backward alone: the rest of a step hides on one node with many micro-batches."""
    config, machine = run(dp=8, length=length, flags=flags), PRESETS[name]
    costs = step_costs(config, machine)
    flops = flops_per_step(config).model / config.training.global_batch_size
    seconds = sum(costs.forward) + sum(costs.backward)
    assert least < flops / seconds / machine.peak_flops(config.training.precision) < most
