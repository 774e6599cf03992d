"""What CUDA graphs do not go with, and in which words that is refused."""

import dataclasses

import pytest

from patch.config import user_message, validate_run
from patch.device import MachineFacts
from patch.errors import ConfigError

GPU = MachineFacts(
    cuda_devices=2,
    cpu_cores=8,
    cuda_memory_bytes=80 * 2**30,
    compute_capability=(9, 0),
    libraries=frozenset(),
)
GRAPHS = "--cuda-graph-impl=local"
FITTING = dict(PR="bf16", AC="none")

# (positions, flags, every part the message must hold)
REFUSED = [
    (dict(TP="2"), [], ["TP", "got 2, expected 1 beside --cuda-graph-impl local", "messages between ranks"]),
    (dict(PP="2"), [], ["PP", "got 2, expected 1 beside", "several under way"]),
    (dict(CP="2"), [], ["CP", "got 2, expected 1 beside", "messages between ranks"]),
    (dict(AC="sel"), [], ["AC", "got selective, expected none beside", "recomputes"]),
    (dict(AC="auto"), [], ["got auto, expected none beside"]),
    (dict(AC="offload"), [], ["--cpu-offloading", "got true, expected false beside"]),
    (dict(PR="fp8"), [], ["got fp8, expected bf16, fp16 or fp32 beside", "once a step"]),
    ({}, ["--packing"], ["--packing", "got true, expected false beside", "borders"]),
    ({}, ["--window-size=15,0"], ["--window-size: got 15,0, expected none beside"]),
    ({}, ["--precision-align=eager"], ["--precision-align: got eager, expected none beside"]),
    ({}, ["--optimizer-offload-policy=static"], ["got static, expected false beside"]),
    ({}, ["--gradient-accumulation-fusion"], ["got true, expected auto or false beside", "asks"]),
]


@pytest.mark.parametrize("positions,flags,parts", REFUSED, ids=lambda v: str(v))
def test_refused_in_words_that_help(command, positions, flags, parts):
    command.machine = GPU
    with pytest.raises(ConfigError) as caught:
        validate_run(command.parse(GRAPHS, *flags, **{**FITTING, **positions}).config, GPU)
    for part in parts:
        assert part in user_message(caught.value)


def test_they_need_a_gpu_and_our_own_layers(command):
    def refusal(machine: MachineFacts, *flags: str) -> str:
        command.machine = machine
        with pytest.raises(ConfigError) as caught:
            validate_run(command.parse(GRAPHS, *flags, **FITTING).config, machine)
        return user_message(caught.value)

    assert "--cuda-graph-impl: got local, expected none: this machine has no GPU" in refusal(
        MachineFacts(cuda_devices=0, cpu_cores=2)
    )
    engine = dataclasses.replace(GPU, libraries=frozenset({"transformer_engine"}))
    assert "--transformer-impl: got auto, expected local beside --cuda-graph-impl local" in refusal(engine)
    for machine, flags in ((GPU, []), (engine, ["--transformer-impl=local"])):
        command.machine = machine
        notes = validate_run(command.parse(GRAPHS, *flags, **FITTING).config, machine)
        assert any("--cuda-graph-impl local: graphs keep one more gradient" in note for note in notes)
