"""What is said of a run that is allowed: values without effect, and what may surprise."""

from pathlib import Path

import pytest

from patch.device import GPU_LIBRARIES, MachineFacts
from patch.preflight import run_warnings, validate_run

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)
GPUS = MachineFacts(cuda_devices=2, cpu_cores=2)
VPP = "--num-layers-per-virtual-pipeline-stage"


def _with_two_tokenizers(command, text):
    """A run from a Hugging Face folder, with a tokenizer of its own that holds `text`."""
    (command.tokenizer / "tokenizer.json").write_text(text)
    return command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=command.hf_folder()).config


def test_tokenizer_that_is_not_the_weights_own_is_said(command):
    config = _with_two_tokenizers(command, "{}")
    (note,) = validate_run(config, GPUS)
    assert note == (
        f"--tokenizer-name-or-path (TOKENIZER_PATH): {command.tokenizer} is used, not the tokenizer in "
        f"{command.folder / 'hf'}, which has the same files"
    )
    assert run_warnings(config) == []


def test_tokenizer_that_differs_from_the_weights_own_is_warned_of(command):
    config = _with_two_tokenizers(command, "{ }")
    assert validate_run(config, GPUS) == []
    (warning,) = run_warnings(config)
    assert warning.startswith(f"--tokenizer-name-or-path (TOKENIZER_PATH): {command.tokenizer} is used, not ")
    assert warning.endswith("hf, whose tokenizer.json differs: the weights were trained with that one")


def test_tokenizer_of_the_weights_by_another_name_is_no_news(command):
    folder = command.hf_folder()
    flag = f"--tokenizer-name-or-path={folder}/../hf"
    config = command.parse(flag, MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=folder).config
    assert validate_run(config, GPUS) == run_warnings(config) == []


def test_tokenizer_beside_weights_without_one_is_no_news(command):
    folder = command.hf_folder()
    (Path(folder) / "tokenizer.json").unlink()
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=folder).config
    assert validate_run(config, GPUS) == run_warnings(config) == []


def test_weights_with_other_numerics_are_noted(command):
    del command.environ["TOKENIZER_PATH"]
    config = command.parse(
        "--rope-scaling-factor=2", MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=command.hf_folder()
    ).config
    notes = validate_run(config, GPUS)
    assert len(notes) == 1 and notes[0].startswith("--rope-scaling-factor: 2.0 here, 4.0 in ")


@pytest.mark.parametrize(
    ("positions", "flags", "note"),
    [
        (dict(SP="true"), [], "--sequence-parallel (position 13 SP) has no effect at TP=1"),
        ({}, ["--no-tp-comm-overlap"], "--tp-comm-overlap has no effect at TP=1"),
        (
            dict(PP="2"),
            ["--nproc-per-node=2", f"{VPP}=1"],
            f"{VPP} (MP_VP) has no effect: a process has no more layers",
        ),
        (
            {},
            ["--recompute-num-layers=2"],
            "--recompute-num-layers (MP_AC_LAYERS) has no effect without AC=full",
        ),
        (
            dict(AC="sel"),
            ["--cpu-offloading-num-layers=1"],
            "--cpu-offloading-num-layers has no effect without --cpu-offloading (position 17 AC)",
        ),
        (dict(AC="sel"), ["--recompute-method=block"], "--recompute-method has no effect without AC=full"),
        (
            dict(OPTIMIZER_OFFLOAD="auto"),
            ["--optimizer-offload-fraction=0.5"],
            "--optimizer-offload-fraction (OPTIMIZER_OFFLOAD_FRACTION) has no effect with "
            "--optimizer-offload-policy (position 18 OPTIMIZER_OFFLOAD) auto",
        ),
        (
            {},
            ["--optimizer-offload-chunk-size=5e6"],
            "--optimizer-offload-chunk-size has no effect with "
            "--optimizer-offload-policy (position 18 OPTIMIZER_OFFLOAD) false",
        ),
        (
            dict(OPTIMIZER_OFFLOAD="static"),
            ["--optimizer-offload-auto-threshold=5e6"],
            "--optimizer-offload-auto-threshold has no effect with "
            "--optimizer-offload-policy (position 18 OPTIMIZER_OFFLOAD) static",
        ),
        (
            dict(OPTIMIZER_OFFLOAD="auto"),
            ["--simulated-device-memory=5e9"],
            "--simulated-device-memory has no effect beside a GPU",
        ),
    ],
)
def test_value_without_effect_is_noted(command, positions, flags, note):
    assert validate_run(command.parse(*flags, **positions).config, GPUS) == [note]


@pytest.mark.parametrize(
    ("policy", "flags"),
    [("static", []), *((policy, ["--simulated-device-memory=1e9"]) for policy in ("static", "auto"))],
)
def test_offload_on_the_cpu(command, policy, flags):
    command.environ |= {"OPTIMIZER_OFFLOAD_FRACTION": "0.3"} if policy == "static" else {}
    if policy == "auto":
        flags = [*flags, "--optimizer-offload-auto-threshold=1e8"]
    config = command.parse("--attention-backend=auto", *flags, OPTIMIZER_OFFLOAD=policy).config
    assert validate_run(config, command.machine) == []
    assert config.optimizer.optimizer_offload_fraction == (0.3 if policy == "static" else 1.0)


@pytest.mark.parametrize(
    ("machine", "flags", "device"),
    [
        (CPU, ["--simulated-device-memory=2147483648"], "2147483648 of --simulated-device-memory"),
        (MachineFacts(1, 2, cuda_memory_bytes=2**30), [], "1073741824 of a GPU"),
        (CPU, ["--simulated-device-memory=2147483649"], None),
        (MachineFacts(1, 2, cuda_memory_bytes=2**32), [], None),
    ],
)
def test_threshold_that_leaves_nothing_for_auto_is_noted(command, machine, flags, device):
    config = command.parse("--attention-backend=auto", *flags, OPTIMIZER_OFFLOAD="auto").config
    wanted = [
        "--optimizer-offload-auto-threshold: keeps 2147483648 bytes free, which is all the "
        f"{device}: optimizer states never leave host memory"
    ]
    assert validate_run(config, machine) == (wanted if device else [])


def test_flash_attention_on_the_cpu_is_noted(command):
    (note,) = validate_run(command.parse(FL="true").config, command.machine)
    assert note.startswith("--attention-backend (position 15 FL) has no effect on the CPU")
    assert validate_run(command.parse(FL="false").config, command.machine) == []


def test_sums_that_8_bit_products_do_not_make_are_noted(command):
    said = "--gradient-accumulation-fusion has no effect on our own layers with 8-bit products"
    hopper = MachineFacts(2, 2, compute_capability=(9, 0), libraries=frozenset(GPU_LIBRARIES))
    for flags, machine, is_noted in (
        ([], command.machine, True),
        ([], hopper, False),
        (["--transformer-impl=local"], hopper, True),
    ):
        config = command.parse("--gradient-accumulation-fusion", *flags, PR="fp8").config
        assert (said in validate_run(config, machine)) == is_noted
    assert said not in validate_run(command.parse(PR="fp8").config, command.machine)


def test_flags_of_the_loss_scale_without_effect_are_noted(command):
    machine = MachineFacts(1, 2, libraries=frozenset(GPU_LIBRARIES))
    bf16 = validate_run(command.parse("--hysteresis=2", PR="bf16").config, machine)
    assert "--hysteresis has no effect without fp16 at --precision (position 9 PR)" in bf16
    notes = validate_run(command.parse("--hysteresis=2", "--loss-scale=8", PR="fp16").config, machine)
    assert [note for note in notes if "scale" in note] == ["--hysteresis has no effect with --loss-scale"]


def test_limits_of_alignment_are_noted(command):
    flags = ["--precision-align=eager", "--nproc-per-node=2", "--gradient-accumulation-fusion"]
    config = command.parse(*flags, TP="2").config
    bound, fusion, backend = validate_run(config, GPUS)
    assert fusion == "--gradient-accumulation-fusion has no effect with --precision-align"
    assert bound.startswith("--precision-align: equal to transformers to the bit at TP=1 only; TP=2 sums")
    assert backend == "--attention-backend (position 15 FL) has no effect with --precision-align"


def test_padding_in_pretraining_is_noted(command):
    command.environ["MP_DATASET_TYPE"] = "idxmap"
    for ending in (".bin", ".idx"):
        (command.folder / f"text{ending}").touch()
    config = command.parse(
        SFT="false",
        DATASET_PATH=str(command.folder / "text"),
        TRAIN_TOKENS_OR_ITERS="1e5",
        WARMUP_TOKENS_OR_ITERS="0",
    ).config
    (note,) = validate_run(config, GPUS)
    assert note.startswith("--max-padding-length (position 8 PAD_LEN) has no effect on .bin/.idx")


def test_names_of_columns_have_no_effect_on_indexed_data(command):
    command.environ["MP_DATASET_TYPE"] = "idxmap"
    for ending in (".bin", ".idx"):
        (command.folder / f"set{ending}").touch()
    tokens = {"TRAIN_TOKENS_OR_ITERS": "1e5", "WARMUP_TOKENS_OR_ITERS": "0", "PAD_LEN": "64"}
    config = command.parse(
        "--columns=text=body", "--alpaca-input-join=empty",
        SFT="false", DATASET_PATH=str(command.folder / "set"), **tokens,
    ).config  # fmt: skip
    assert validate_run(config, GPUS) == [
        "--columns has no effect on .bin/.idx",
        "--alpaca-input-join has no effect on .bin/.idx",
    ]
