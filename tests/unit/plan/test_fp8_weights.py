"""8-bit weights that a step keeps: their bytes, and when there is no room for them."""

from small_runs import small_run

from patch.device import MachineFacts
from patch.plan.fits import heaviest_rank
from patch.plan.memory import cast_weight_bytes
from patch.plan.resolve import resolve_activations, resolve_cast_weights

UNKNOWN = MachineFacts(0, 2)
LAYERS = {"precision": "fp8", "num_layers": 8, "global_batch_size": 8, "micro_batch_size": 1}


def matrices(run) -> int:
    """Elements of a layer's matrices: q, k, v and projection, gate, up and down."""
    model = run.model
    heads, groups = (n * model.kv_channels for n in (model.num_attention_heads, model.num_query_groups))
    return model.hidden_size * (2 * heads + 2 * groups + 3 * model.ffn_hidden_size)


def test_bytes_of_a_rank_are_two_for_each_element_of_its_layers_in_8_bits() -> None:
    whole = small_run(**LAYERS)
    assert cast_weight_bytes(whole, 0) == 2 * 8 * matrices(whole)
    assert cast_weight_bytes(small_run(tp=2, **LAYERS), 0) == 8 * matrices(whole)
    mixed = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3, **LAYERS}
    for layout, layers in (({}, [4]), ({"pp": 2}, [3, 1]), ({"pp": 2, "stage": 2}, [2, 2])):
        run = small_run(**layout, **mixed)  # layers 2 to 5 of 8
        found = [cast_weight_bytes(run, rank) for rank in range(len(layers))]
        assert found == [2 * n * matrices(whole) for n in layers]
    few = {"global_batch_size": 1}
    for changes in ({"precision": "bf16"}, few, {"disable_parameter_transpose_cache": True}):
        assert cast_weight_bytes(small_run(**LAYERS | changes), 0) == 0


def test_they_are_kept_where_there_is_room_beside_all_activations() -> None:
    run = small_run(**LAYERS)
    rank = heaviest_rank(run, cuda=False)
    assert rank.beside["fp8 weights"] == cast_weight_bytes(run, 0)
    assert resolve_cast_weights(run, UNKNOWN) == (run, [])
    on_host = MachineFacts(0, 2, host_memory_bytes=rank.total)
    assert resolve_cast_weights(run, on_host) == (run, [])
    less = MachineFacts(0, 2, host_memory_bytes=rank.total - 1)
    for machine, room in ((UNKNOWN, rank.total - 1), (less, None)):
        short = small_run(simulated_device_memory=room, **LAYERS)
        chosen, (line,) = resolve_cast_weights(short, machine)
        assert not chosen.casts.are_kept and "no room to keep" in line
    enough = small_run(simulated_device_memory=rank.total, **LAYERS)
    assert resolve_cast_weights(enough, UNKNOWN) == (enough, [])
    auto = small_run(simulated_device_memory=rank.total - 1, recompute_granularity="auto", **LAYERS)
    chosen, _ = resolve_activations(resolve_cast_weights(auto, UNKNOWN)[0], UNKNOWN)
    assert not chosen.casts.are_kept and chosen.training.recompute_granularity is None
