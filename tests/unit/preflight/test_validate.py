"""Every rule of a run: what it refuses, in which words, and that the good run passes."""

import dataclasses
import os
from pathlib import Path

import pytest
from refusals import refused

from patch.config import to_yaml, user_message
from patch.config.fields import NOT_BUILT
from patch.device import MachineFacts
from patch.errors import ConfigError, DataError
from patch.preflight import parse_args, validate_run

GPUS = MachineFacts(cuda_devices=2, cpu_cores=2)
VPP = "--num-layers-per-virtual-pipeline-stage"

# (positions, flags, every part the message must hold)
DOCUMENTS = dict(SFT="false", TRAIN_TOKENS_OR_ITERS="1e5", WARMUP_TOKENS_OR_ITERS="0")
REFUSED = [
    (
        dict(PR="fp8"),
        ["--fp8-recipe=mxfp8"],
        [
            "--fp8-recipe: got mxfp8, expected tensorwise, rowwise or delayed",
            "a scale for each block of numbers is not built yet",
        ],
    ),
    (
        {},
        ["--overlapped-distributed-optimizer"],
        ["--overlapped-distributed-optimizer: got true", "position 14 DO) true"],
    ),
    (dict(DO="true"), ["--data-parallel-sharding=none"], ["got none, expected optimizer, gradients, auto"]),
    ({}, ["--reduce-bucket-size=0"], ["--reduce-bucket-size: got 0, expected at least 1"]),
    (
        dict(OPTIMIZER_OFFLOAD="auto"),
        [],
        [
            "position 18 OPTIMIZER_OFFLOAD): got auto, expected false, static, or auto with",
            "--simulated-device-memory BYTES: there is no GPU",
        ],
    ),
    ({}, ["--optimizer-offload-fraction=1.5"], ["(OPTIMIZER_OFFLOAD_FRACTION): got 1.5, expected 0 to 1"]),
    ({}, ["--optimizer-offload-fraction=-0.1"], ["got -0.1, expected 0 to 1"]),
    ({}, ["--optimizer-offload-auto-threshold=-1"], ["got -1, expected at least 0"]),
    ({}, ["--optimizer-offload-chunk-size=-1"], ["got -1, expected at least 0"]),
    ({}, ["--simulated-device-memory=-1"], ["got -1, expected at least 0"]),
    ({}, ["--columns=question"], ["--columns: got 'question', expected NAME=COLUMN, such as instruction="]),
    ({}, ["--columns=output=answer,"], ["--columns: got '', expected NAME=COLUMN"]),
    (
        {},
        ["--columns=ouput=answer"],
        ["got the name 'ouput', expected one of messages", "did you mean output?"],
    ),
    ({}, ["--columns=text=a,text=b"], ["--columns: got text twice (a, b), expected it once"]),
    (
        DOCUMENTS,
        ["--packing", "--dataset-type=idxmap"],
        ["--packing (MP_SFT_PACKING): got true", "sequences of pre-training are full"],
    ),
    (
        dict(PR="fp16"),
        ["--min-loss-scale=4", "--initial-loss-scale=2"],
        ["--min-loss-scale: got 4.0, expected at most --initial-loss-scale 2.0"],
    ),
    ({}, ["--no-distributed-checkpointing"], ["--distributed-checkpointing: got false, expected true"]),
    (
        DOCUMENTS,
        [],
        ["(MP_DATASET_TYPE): got raw, expected idxmap, or SFT=true"],
    ),
    (dict(BATCH_SIZE="0"), [], ["position 3 BATCH_SIZE): got 0, expected at least 1"]),
    (dict(TP="0"), ["--nproc-per-node=1"], ["position 10 TP): got 0, expected at least 1"]),
    (
        dict(SAVE_INTERVAL="20"),
        ["--save-retain-every=30"],
        [
            "--save-retain-every: got 30, expected a multiple of --save-interval (position 19",
            "SAVE_INTERVAL) 20",
        ],
    ),
    (dict(SAVE_INTERVAL="-5"), [], ["position 19 SAVE_INTERVAL): got -5, expected at least 1"]),
    (dict(LR="0"), [], ["position 5 LR): got 0.0, expected more than 0"]),
    ({}, ["--decoupled-lr=0"], ["--decoupled-lr: got 0.0, expected more than 0"]),
    ({}, ["--decoupled-lr=1e-9"], ["--decoupled-lr: got 1e-09, expected at least --decoupled-min-lr"]),
    (
        {},
        ["--decoupled-lr=1e-3", "--decoupled-min-lr=1e-2"],
        ["--decoupled-lr: got 0.001, expected at"],
    ),
    (
        {},
        ["--decoupled-min-lr=0"],
        ["--decoupled-min-lr: got 0.0, expected none: it goes with"],
    ),
    (dict(MIN_LR="-1"), [], ["position 6 MIN_LR): got -1.0, expected at least 0"]),
    ({}, ["--adam-beta2=1"], ["--adam-beta2: got 1.0, expected at least 0 and below 1"]),
    ({}, ["--num-query-groups=3"], ["--num-query-groups: got 3, expected one of 1, 2, 4", "4 heads"]),
    ({}, ["--kv-channels=15"], ["--kv-channels: got 15, expected at least 1 and a multiple of 2"]),
    ({}, ["--rope-low-freq-factor=4"], ["got 4.0, expected less than --rope-high-freq-factor 4.0"]),
    ({}, ["--rope-scaling-type=yarn", "--no-use-rope-scaling"], ["got yarn, expected --use-rope-scaling"]),
    (
        {},
        ["--rope-scaling-type=yarn", "--yarn-beta-slow=40"],
        ["--yarn-beta-slow: got 40.0, expected less than --yarn-beta-fast 32.0"],
    ),
    (
        {},
        ["--rope-scaling-type=dynamic", "--rope-scaling-factor=0.5"],
        ["--rope-scaling-factor: got 0.5, expected at least 1"],
    ),
    (
        {},
        ["--rope-scaling-type=dynamic", "--kv-channels=2"],
        ["--kv-channels: got 2, expected at least 4: the base grows with the context"],
    ),
    (
        dict(SEQ_LEN="262145"),
        ["--rope-scaling-type=dynamic", "--rope-scaling-factor=2"],
        ["got 262145, expected at most 262144"],
    ),
    ({}, ["--window-size=4,1"], ["--window-size: got 4,1", "attention is causal"]),
    (
        {},
        ["--export-hf", "--add-qkv-bias", "--qk-layernorm"],
        ["--export-hf: got true", "--add-qkv-bias and --qk-layernorm"],
    ),
    (dict(TP="3"), [], ["position 10 TP): got 3, expected one of 1, 2:", "4 heads"]),
    (dict(TP="4"), [], ["got 4, expected one of 1, 2:", "2 key/value groups"]),
    (
        dict(TP="3"),
        [],
        ["got 3, expected one of 1, 2: it divides each of the model's 4 heads, 2 key/value groups, "],
    ),
    (dict(TP="2"), ["--ffn-hidden-size=191"], ["got 2, expected one of 1:", "191 MLP channels"]),
    (dict(PP="3"), [], ["position 11 PP): got 3, expected at most 2:", "2 layers"]),
    (
        dict(PP="2"),
        ["--num-layers=5", "--num-layers-per-virtual-pipeline-stage=1"],
        ["(MP_VP): got 1, expected 0", "5 layers do not divide by PP=2"],
    ),
    (
        dict(PP="3", AC="full"),
        ["--num-layers=5", "--recompute-num-layers=2"],
        ["(MP_AC_LAYERS): got 2, expected one of 1:", "1 or 2 layers"],
    ),
    (
        {},
        [f"{VPP}=1"],
        [f"{VPP} (MP_VP): got 1, expected 0, or", "position 11 PP) above 1: one process has all layers"],
    ),
    (
        dict(PP="2"),
        ["--num-layers=12", f"{VPP}=4"],
        ["(MP_VP): got 4, expected 0 or one of 1, 2, 3, 6: a process has 6 layers"],
    ),
    (
        dict(PP="2", AC="full"),
        ["--num-layers=4", f"{VPP}=1", "--recompute-num-layers=2"],
        ["(MP_AC_LAYERS): got 2, expected one of 1: a stage has 1 layers"],
    ),
    (
        dict(PP="2", GLOBAL_BATCH_SIZE="2"),
        ["--num-layers=4", f"{VPP}=1"],
        ["position 4 GLOBAL_BATCH_SIZE): got 2, expected at least 4: interleaved stages", "PP=2"],
    ),
    (
        dict(AC="full"),
        ["--recompute-num-layers=3"],
        ["(MP_AC_LAYERS): got 3, expected one of 1, 2:", "2 layers"],
    ),
    (dict(PAD_LEN="128"), [], ["position 8 PAD_LEN): got 128, expected at most 64", "position 7 SEQ_LEN"]),
    (dict(SEQ_LEN="200000"), [], ["position 7 SEQ_LEN): got 200000, expected at most 131072"]),
    (dict(TP="2", SP="true", PAD_LEN="33"), [], ["position 8 PAD_LEN): got 33, expected a multiple of TP=2"]),
    (dict(CP="3"), [], ["PAD_LEN): got 32, expected a multiple of 2 x CP=3: CP=3 cuts", "in 6 chunks"]),
    (
        dict(CP="2", TP="2", SP="true", PAD_LEN="34"),
        [],
        ["PAD_LEN): got 34, expected a multiple of 2 x CP=2", "in 4 chunks, and SP=true each rank's part"],
    ),
    (
        dict(CP="4", SFT="false", SEQ_LEN="1028", TRAIN_TOKENS_OR_ITERS="1e5", WARMUP_TOKENS_OR_ITERS="0"),
        ["--dataset-type=idxmap"],
        ["position 7 SEQ_LEN): got 1028, expected a multiple of 2 x CP=4"],
    ),
    (
        dict(CP="2"),
        ["--precision-align=sdpa"],
        ["position 12 CP): got 2, expected 1, or none at --precision-align", "have other bits"],
    ),
    (
        dict(CP="4", TP="2"),
        ["--cp-comm-type=a2a"],
        ["--cp-comm-type: got a2a, expected p2p or auto: CP=4 ranks cannot share the 2 query heads of"],
    ),
    (
        dict(TP="2"),
        ["--nproc-per-node=3"],
        ["(NPROC_PER_NODE): got 3", "multiple of 2 (TP x PP x CP = 2 x 1 x 1)"],
    ),
    (
        dict(GLOBAL_BATCH_SIZE="10"),
        ["--nproc-per-node=2"],
        [
            "position 4 GLOBAL_BATCH_SIZE): got 10, expected a multiple of 4 such as 8 or 12",
            "2 data-parallel",
        ],
    ),
    (dict(GLOBAL_BATCH_SIZE="1"), [], ["got 1, expected a multiple of 2 such as 2:"]),
    (dict(WARMUP_TOKENS_OR_ITERS="20"), [], ["position 24", "got 20, expected less than the run's 20"]),
    (
        dict(SFT="false", TRAIN_TOKENS_OR_ITERS="1024", WARMUP_TOKENS_OR_ITERS="1024"),
        ["--dataset-type=idxmap"],
        ["position 24", "got 1024 tokens (2 steps), expected less than the run's 1024 tokens (2 steps)"],
    ),
    (dict(MIN_LR="1"), [], ["position 6 MIN_LR): got 1.0, expected at most LR 0.001"]),
    (dict(PRETRAIN_CHECKPOINT_PATH="/no/model"), [], ["position 22", "got /no/model", "no such folder"]),
    ({}, ["--tokenizer-name-or-path=/no/tok"], ["(TOKENIZER_PATH): got /no/tok", "tokenizer.json"]),
    ({}, ["--chat-template=chatlm"], ["--chat-template: got chatlm", "plain, or a .jinja file", "chatml?"]),
    ({}, ["--tokenizer-name-or-path=none"], ["(TOKENIZER_PATH): got none", "PRETRAIN_CHECKPOINT_PATH"]),
    ({}, ["--split=99,1,0"], ["--split: got 99,1,0, expected none", "of a pre-training set"]),
    ({}, ["--eod-mask-loss"], ["--eod-mask-loss: got true, expected", "SFT=false"]),
    *(
        (DOCUMENTS, ["--dataset-type=idxmap", *flags], parts)
        for flags, parts in (
            (["--reset-position-ids"], ["--reset-position-ids: got true", "or --reset-attention-mask too"]),
            (["--split=99,1,0", "--valid-data-path=x"], ["position 21", "/x, expected none"]),
            (["--split=0,1"], ["--split: got '0,1', expected shares", "99,1,0"]),
            (["--split=9,x"], ["--split: got '9,x', expected shares"]),
            (["--split=9,1,0,0"], ["--split: got '9,1,0,0', expected shares"]),
            (["--split=1,-1"], ["--split: got '1,-1', expected shares"]),
            (["--split=1e3,1"], ["--split: got '1e3,1', expected shares"]),
        )
    ),
]


@pytest.mark.parametrize(("positions", "flags", "parts"), REFUSED)
def test_configuration_that_cannot_run_is_refused(command, positions, flags, parts):
    config = command.parse(*flags, **positions).config
    with pytest.raises(ConfigError) as caught:
        validate_run(config, command.machine)
    for part in parts:
        assert part in user_message(caught.value)


def test_every_unbuilt_feature_has_a_refusal_above(command):
    messages = []
    for positions, flags, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            validate_run(command.parse(*flags, **positions).config, command.machine)
        messages.append(user_message(caught.value))
    for row in NOT_BUILT:
        assert any(f"{row.feature} is not built yet" in message for message in messages), row.feature


def test_good_run_passes_and_writes_nothing(command):
    before = sorted(os.listdir(command.folder))
    assert validate_run(command.parse(FL="true").config, GPUS) == []
    assert sorted(os.listdir(command.folder)) == before


def test_any_number_of_micro_batches_from_pp_on_can_be_interleaved(command):
    for batch in ("4", "6", "10"):
        config = command.parse(
            "--num-layers=4", f"{VPP}=1", "--nproc-per-node=2", PP="2", GLOBAL_BATCH_SIZE=batch
        ).config
        assert validate_run(config, GPUS) == []
        assert (config.virtual_pipeline_size, config.stage_layers) == (2, [1, 1, 1, 1])


def test_more_processes_than_gpus_are_refused(command):
    config = command.parse("--nproc-per-node=4").config
    with refused(
        ConfigError, match=r"\(NPROC_PER_NODE\): got 4, expected at most 2: each process needs its own GPU"
    ):
        validate_run(config, GPUS)
    validate_run(config, command.machine)  # on the CPU they may be as many as one likes


def test_folder_without_weights_or_checkpoint_is_refused(command):
    (command.folder / "empty").mkdir()
    config = command.parse(PRETRAIN_CHECKPOINT_PATH=str(command.folder / "empty")).config
    with refused(ConfigError, match=r"position 22.*config\.json.*checkpoint/: a folder without either"):
        validate_run(config, command.machine)


def test_checkpoint_without_a_complete_iteration_is_refused(command, run_folder):
    folder = run_folder(command.folder / "run", to_yaml(command.parse().config))
    (folder / "checkpoint" / "iter_0000010" / ".metadata").unlink()
    for load in (folder, folder / "checkpoint"):
        config = command.parse(PRETRAIN_CHECKPOINT_PATH=str(load)).config
        with refused(ConfigError, match="latest_checkpointed_iteration.txt is there, but no complete"):
            validate_run(config, command.machine)


@pytest.mark.parametrize(
    "below", ["", "checkpoint", "checkpoint/../", "checkpoint/iter_0000010", "checkpoint/last"]
)
def test_another_run_gives_shape_tokenizer_and_weights(command, run_folder, below):
    shape = ["--num-layers=4", "--make-vocab-size-divisible-by=32", "--rotary-base=7"]
    other = command.parse(*shape).config
    folder = run_folder(command.folder / "run", to_yaml(other))
    (folder / "checkpoint" / "last").symlink_to("iter_0000010")
    command.environ.pop("TOKENIZER_PATH")
    positions = dict(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=os.path.join(folder, below))
    config = command.parse(**positions).config
    assert dataclasses.replace(config.model, model_size="tiny") == other.model
    assert config.tokenizer_folder == str(command.tokenizer)
    assert validate_run(config, GPUS) == []
    assert command.parse("--num-layers=3", **positions).config.model.num_layers == 3


def test_another_run_of_another_shape_is_refused(command, run_folder):
    folder = run_folder(command.folder / "run", to_yaml(command.parse("--num-layers=4").config))
    config = command.parse(PRETRAIN_CHECKPOINT_PATH=str(folder)).config
    with refused(ConfigError, match=r"MODEL_SIZE\): got tiny, expected auto, .*yaml has --num-layers 4"):
        validate_run(config, command.machine)


def test_checkpoint_alone_is_taken_with_a_tokenizer_of_its_own(command, run_folder):
    folder = run_folder(command.folder / "run", "")
    (folder / "config.yaml").unlink()
    validate_run(command.parse(PRETRAIN_CHECKPOINT_PATH=str(folder)).config, command.machine)
    with refused(ConfigError, match="position 2 MODEL_SIZE.*: auto reads .* their config.yaml"):
        command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder))
    command.environ.pop("TOKENIZER_PATH")
    with refused(ConfigError, match=r"TOKENIZER_PATH\): got .*run, expected a folder with one of"):
        validate_run(command.parse(PRETRAIN_CHECKPOINT_PATH=str(folder)).config, command.machine)


def test_folder_that_only_describes_a_tokenizer_is_refused(command):
    (command.tokenizer / "tokenizer.json").rename(command.tokenizer / "tokenizer_config.json")
    with refused(ConfigError, match=r"with one of tokenizer\.json, tokenizer\.model: none of them"):
        validate_run(command.parse().config, command.machine)


def test_another_runs_folder_is_read_from_anywhere(command, run_folder, monkeypatch):
    monkeypatch.chdir(command.folder)
    command.environ["TOKENIZER_PATH"] = "tokenizer"
    first = command.parse(DATASET_PATH="rows.json", OUTPUT_BASEPATH="a", VALID_DATASET_PATH="none").config
    folder = run_folder(command.folder / "a", to_yaml(first))
    (command.folder / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    del command.environ["TOKENIZER_PATH"]
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH="../a").config
    assert (config.checkpoint.load, config.tokenizer_folder) == (str(folder), str(command.tokenizer))
    assert (config.data.valid_data_path, first.checkpoint.load) == (None, None)
    validate_run(config, GPUS)
    again = parse_args(["--config", "../a/config.yaml"], {}, command.machine).config
    assert again == first
    validate_run(again, command.machine)


def test_weights_of_another_shape_are_refused_before_anything_starts(command):
    config = command.parse(MODEL_SIZE="tiny", PRETRAIN_CHECKPOINT_PATH=command.hf_folder()).config
    message = (
        r"position 2 MODEL_SIZE\): got tiny, expected auto, .*: .*config\.json has --vocab-size 600, tiny"
    )
    with refused(ConfigError, match=message):
        validate_run(config, command.machine)
    load = {"MODEL_SIZE": "auto", "PRETRAIN_CHECKPOINT_PATH": command.hf_folder()}
    config = command.parse("--vocab-size=601", **load).config
    with refused(ConfigError, match=r"--vocab-size: got 601, expected 600: .*config\.json says so"):
        validate_run(config, command.machine)


def test_file_in_the_way_of_the_output_is_refused(command):
    config = command.parse(OUTPUT_BASEPATH=str(command.data / "sub")).config
    with refused(ConfigError, match=r"position 25 OUTPUT_BASEPATH.*rows\.json is a file"):
        validate_run(config, command.machine)


def test_output_on_a_read_only_file_system_is_refused(command):
    """Root may write to /proc by its mode, and cannot all the same."""
    for folder in ("/proc", "/proc/sys"):
        config = command.parse(OUTPUT_BASEPATH=f"{folder}/run/one").config
        with refused(ConfigError, match=f"position 25 OUTPUT_BASEPATH.*{folder} is not writable"):
            validate_run(config, command.machine)


def test_stop_file_that_was_left_is_refused(command):
    config = command.parse("--stop-file", str(command.data)).config
    with refused(ConfigError, match=r"--stop-file: got .*rows\.json, expected no file there: .* remove it"):
        validate_run(config, command.machine)
    (command.folder / "out").mkdir()
    (command.folder / "out" / "STOP").touch()
    with refused(ConfigError, match=r"--stop-file: got .*/out/STOP, expected no file there"):
        validate_run(command.parse().config, command.machine)


def test_missing_data_is_a_data_error_after_the_configuration(command):
    lost = dict(DATASET_PATH="/no/rows.json")
    with pytest.raises(ConfigError):
        validate_run(command.parse(TP="3", **lost).config, command.machine)
    with refused(DataError, match=r"position 20 DATASET_PATH.*/no/rows\.json does not exist") as caught:
        validate_run(command.parse(**lost).config, command.machine)
    assert caught.value.exit_code == 3


def test_missing_validation_file_is_named(command):
    with refused(DataError, match=r"position 21 VALID_DATASET_PATH.*/no/valid\.json does not exist"):
        validate_run(command.parse(VALID_DATASET_PATH="/no/valid.json").config, command.machine)


def test_folder_without_data_is_named(command):
    with refused(DataError, match="position 20.*/empty is a folder without data: it is empty; expected"):
        (command.folder / "empty").mkdir()
        validate_run(command.parse(DATASET_PATH=str(command.folder / "empty")).config, command.machine)


def test_every_file_of_a_glob_is_checked(command):
    for name in ("a.jsonl", "b.jsonl"):
        (command.folder / name).write_text("{}")
    config = command.parse(DATASET_PATH=f"{command.folder}/*.jsonl").config
    validate_run(config, command.machine)
    (command.folder / "b.jsonl").unlink()
    (command.folder / "b.jsonl").symlink_to("nowhere")
    with refused(DataError, match=r"position 20.*b\.jsonl does not exist"):
        validate_run(config, command.machine)


@pytest.mark.timeout(60)
def test_pipe_or_device_as_data_is_refused_before_it_is_read(command):
    os.mkfifo(command.folder / "pipe")
    for path in (str(command.folder / "pipe"), "/dev/zero", "/dev/urandom"):
        for field in ("DATASET_PATH", "VALID_DATASET_PATH"):
            with refused(DataError, match=f"{field}.*: {path} is a pipe or a device, expected a file"):
                validate_run(command.parse(**{field: path}).config, command.machine)


def test_indexed_data_needs_both_files(command):
    prefix = command.folder / "text_document"
    command.environ["MP_DATASET_TYPE"] = "idxmap"
    tokens = dict(SFT="false", TRAIN_TOKENS_OR_ITERS="1e5", WARMUP_TOKENS_OR_ITERS="0")
    prefix.with_suffix(".bin").touch()
    with pytest.raises(
        DataError, match=r"text_document\.idx does not exist, expected the path of \.bin and \.idx"
    ):
        validate_run(command.parse(DATASET_PATH=str(prefix), **tokens).config, command.machine)
    with refused(DataError, match=r"without the ending, that is .*text_document$"):
        validate_run(command.parse(DATASET_PATH=f"{prefix}.bin", **tokens).config, command.machine)
    for rows in ("docs.jsonl", "docs.json"):
        (command.folder / rows).write_text('{"text": "words"}')
        with pytest.raises(
            DataError,
            match=rf"{rows}, which is a file itself.* llama-patch preprocess writes",
        ):
            validate_run(command.parse(DATASET_PATH=str(command.folder / rows), **tokens).config, GPUS)
    prefix.with_suffix(".idx").touch()
    validate_run(command.parse(DATASET_PATH=str(prefix), **tokens).config, command.machine)
    with refused(DataError, match=r"without the ending, did you mean .*/text_document\?"):
        validate_run(command.parse(DATASET_PATH=str(command.folder / "text"), **tokens).config, GPUS)


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (4, 3, [1, 2, 1]),
        (5, 3, [2, 2, 1]),
        (5, 2, [3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (6, 3, [2, 2, 2]),
        (3, 1, [3]),
    ],
)
def test_layers_that_do_not_divide_go_to_the_middle_first(command, layers, pp, expected):
    argv = [f"--num-layers={layers}", f"--nproc-per-node={pp}"]
    config = command.parse(*argv, PP=str(pp), GLOBAL_BATCH_SIZE="8").config
    assert config.stage_layers == expected


def _released(command, name):
    """A folder as the converter leaves it, or as Megatron-LM's old format has it."""
    folder = Path(command.hf_folder())
    (folder / "latest_checkpointed_iteration.txt").write_text("release\n")
    (folder / "release" / name).mkdir(parents=True)
    return folder


def test_converted_folder_is_taken_with_its_shape_and_tokenizer(command):
    folder = _released(command, "")
    for name in (".metadata", "common.pt", "metadata.json"):
        (folder / "release" / name).write_text("")
    (folder / "tokenizer.json").write_text("{}")
    del command.environ["TOKENIZER_PATH"]
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder)).config
    assert config.model.rope_scaling_factor == 4.0 and config.tokenizer_folder == str(folder)
    validate_run(config, GPUS)


def test_legacy_folder_is_refused_with_the_converters_name(command):
    folder = _released(command, "mp_rank_00")
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder)).config
    with refused(ConfigError, match=r"mp_rank_\*.*llama-patch convert mcore2hf"):
        validate_run(config, GPUS)
