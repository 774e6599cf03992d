"""What 8-bit products do not go with, and in which words that is refused."""

import dataclasses

import pytest
from small_runs import small_run

from patch.checks.precision import fp8_notes
from patch.config import user_message
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.preflight import validate_run

# (positions, flags, every part the message must hold)
REFUSED = [
    (
        dict(PR="bf16"),
        ["--fp8-format=hybrid"],
        ["--fp8-format: got hybrid, expected fp8 at --precision (position 9 PR) beside it"],
    ),
    (dict(PR="bf16"), ["--fp8-recipe=rowwise"], ["--fp8-recipe: got rowwise, expected fp8 at --precision"]),
    (
        dict(PR="bf16"),
        ["--disable-parameter-transpose-cache"],
        ["--disable-parameter-transpose-cache: got true, expected fp8 at --precision"],
    ),
    (dict(PR="bf16"), ["--fp8-param-gather"], ["--fp8-param-gather: got true, expected fp8 at --precision"]),
    (
        dict(PR="fp8"),
        ["--fp8-param-gather", "--fp8-recipe=rowwise"],
        ["--fp8-recipe: got rowwise, expected tensorwise beside --fp8-param-gather", "has one scale"],
    ),
    (
        dict(PR="fp8"),
        ["--fp8-param-gather", "--optimizer-offload-policy=static"],
        ["got static, expected false beside --fp8-param-gather", "would be old ones"],
    ),
    (dict(PR="bf16"), ["--first-last-layers-bf16"], ["--first-last-layers-bf16: got true, expected fp8 at"]),
    (
        dict(PR="fp8"),
        ["--precision-align=eager"],
        ["--precision (position 9 PR): got fp8", "or none at --precision-align", "no products of 8-bit"],
    ),
    (
        dict(PR="fp8"),
        ["--first-last-layers-bf16", "--num-layers-at-end-in-bf16=3"],
        ["--first-last-layers-bf16: got 1 first and 3 last, expected fewer, or bf16", "all 2 layers"],
    ),
    (dict(PR="fp8"), ["--num-layers-at-end-in-bf16=-1"], ["got -1, expected at least 0"]),
    (
        dict(PR="fp8"),
        ["--ffn-hidden-size=200"],
        ["--ffn-hidden-size: got 200, expected another size or TP, or bf16", "MLP width is 200", "of 16"],
    ),
    (dict(PR="fp8"), ["--kv-channels=10"], ["--kv-channels: got 10", "width of the query heads is"]),
    (
        dict(PR="fp8"),
        ["--fp8-recipe=delayed"],
        ["--fp8-recipe: got delayed, expected tensorwise or rowwise", "Engine needs a GPU, and this machine"],
    ),
    (dict(PR="fp8"), ["--hidden-size=72"], ["--hidden-size: got 72", "the hidden width is 72"]),
]


@pytest.mark.parametrize(
    "positions,flags,parts", REFUSED, ids=lambda v: str(v) if isinstance(v, list) else ""
)
def test_refused_in_words_that_help(command, positions, flags, parts):
    with pytest.raises(ConfigError) as caught:
        validate_run(command.parse(*flags, **positions).config, command.machine)
    for part in parts:
        assert part in user_message(caught.value)


def test_8_bit_products_need_a_gpu_that_has_them_or_a_cpu(command):
    config = command.parse(PR="fp8", FL="true").config
    gpus = MachineFacts(cuda_devices=2, cpu_cores=2)
    ampere = dataclasses.replace(gpus, compute_capability=(8, 6))
    with pytest.raises(ConfigError, match=r"the GPU has compute capability 8\.6, 8-bit products need 8\.9"):
        validate_run(config, ampere)
    assert validate_run(config, dataclasses.replace(gpus, compute_capability=(8, 9))) == []
    assert any("slower than bf16 on a CPU" in note for note in validate_run(config, command.machine))


def test_numbers_of_layers_without_their_flag_are_named(command):
    config = command.parse("--num-layers-at-start-in-bf16=2").config
    (note,) = [note for note in validate_run(config, command.machine) if "in-bf16" in note]
    assert note == "--num-layers-at-start-in-bf16 has no effect without --first-last-layers-bf16"


def test_a_gather_of_8_bit_weights_without_replicas_that_share_is_named(command):
    said = "--fp8-param-gather has no effect: no replicas share optimizer states"
    for layout in ({"dp": 1}, {"dp": 2, "data_parallel_sharding": "none"}):
        assert said in list(
            fp8_notes(small_run(precision="fp8", fp8_param_gather=True, **layout), command.machine)
        )
    for sharding, layout in (("optimizer", {"cp": 2}), ("auto", {"dp": 2})):
        layout |= {"data_parallel_sharding": sharding}
        config = small_run(precision="fp8", fp8_param_gather=True, **layout)
        assert said not in list(fp8_notes(config, command.machine))
