"""Named flags: types, unknown and doubled ones, --help."""

import dataclasses
import json
from pathlib import Path

import pytest

from patch.config.choices import ZeroStage
from patch.config.fields import FIELDS, NOT_BUILT
from patch.config.flags import read_flags, spellings
from patch.config.foreign_flags import foreign_flag, foreign_flags, nearest_flag
from patch.config.positions import POSITIONS, VARIABLES
from patch.config.yaml_io import read_run, to_yaml
from patch.errors import ConfigError
from patch.preflight.parse import parse_args
from patch.preflight.validate import validate_run


@pytest.mark.parametrize(("text", "number"), [("12", 12), ("5e2", 500), ("1.2e3", 1200)])
def test_whole_numbers_may_be_scientific(command, text, number):
    assert command.parse("--save-interval", text).config.checkpoint.save_interval == number


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--grobal-batch-size", "2"],
            "unknown argument --grobal-batch-size, did you mean --global-batch-size?",
        ),
        (["--global-batch", "2"], "unknown argument --global-batch, did you mean --global-batch-size?"),
        (["--learning-rate", "2"], "unknown argument --learning-rate: here --lr: position 5 (--help lists"),
        (["--num_train_epochs=2"], "--num_train_epochs: here --train-epochs --train-iters"),
        (["--tp", "2"], "--tp: here --tensor-model-parallel-size: position 10"),
        (["--tokenizer", "folder"], "here --tokenizer-name-or-path"),
        (["--deepspeed"], "unknown argument --deepspeed: leave it out"),
        (["--xyz", "2"], "unknown argument --xyz (--help lists the flags)"),
        (["--no-sequence-paralel"], "did you mean --no-sequence-parallel?"),
        (["--seed", "1", "stray"], "unknown argument 'stray' after --seed: a value with spaces is quoted"),
        (["--seed", "1.5"], "--seed: got '1.5', expected a whole number"),
        (["--seed", "5-"], "--seed: got '5-', expected a whole number"),
        (["--seed", str(2**63)], f"--seed: got '{2**63}', expected a whole number of 64 bits"),
        (["--seed", "1" * 400], "--seed: got '111"),
        (["--seed", "1" * 5000], "111', expected a whole number of 64 bits"),
        (["--window-size", "1" * 5000 + ",0"], "111,0', expected none, or LEFT,0"),
        (["--log-dir", "x" * 5000], "expected a path of at most 3800 bytes"),
        (["--lr", "fast"], "--lr: got 'fast', expected a finite number"),
        (["--lr", "inf"], "--lr: got 'inf', expected a finite number"),
        (["--window-size=4096"], "--window-size: got '4096', expected none, or LEFT,0 such as 4095,0"),
        (
            ["--precision", "bf17"],
            "--precision: got 'bf17', expected one of fp32, fp16, bf16, fp8, did you mean",
        ),
        (["--seed"], "argument --seed: expected one argument; --help lists the flags"),
        (["--sft=yes"], "unknown argument 'yes' after --sft: --sft is true, --no-sft false"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: cannot be read"),
        (["--model-size", "7B"], "--model-size (position 2 MODEL_SIZE): got '7B', expected one of tiny, 1B"),
        (["--model-size", "7B"], "auto; 7B is there as llama2-7B and llama1-7B"),
        (["--model-size", "30B"], "30B is there as llama1-30B"),
    ],
)
def test_wrong_flag_is_explained(command, flags, message):
    with pytest.raises(ConfigError) as caught:
        command.parse(*flags)
    assert message in str(caught.value)


def test_distributed_checkpointing_may_be_asked_for(command):
    assert command.parse("--distributed-checkpointing").config == command.parse().config


def test_later_flag_overrides_an_earlier_one(command):
    config = command.parse("--seed", "7", "--no-sft", "--seed=8", "--sft").config
    assert config.training.seed == 8 and config.training.sft


MEGATRON_LLAMA = (
    "--finetune --sequence-parallel --no-position-embedding --use-rotary-position-embeddings --swiglu "
    "--layernorm-epsilon 1e-6 --tokenizer-type PretrainedFromHF --lr 6e-5 --data-path 0.2 A 0.8 B "
    "--save OUT --load IN --optimizer adam --bf16 --eval-intervall 3 --xyz=1"
)


def test_line_of_another_program_is_answered_whole(command):
    """Every flag that is none, or another one, here; and none of those that are right."""
    with pytest.raises(ConfigError) as caught:
        command.parse(*MEGATRON_LLAMA.split())
    first, *lines = str(caught.value).split("\n  ")
    assert first == "unknown arguments (--help lists the flags):"
    said = {line.split(":")[0].split(",")[0]: line for line in lines}
    needless = "--no-position-embedding, --use-rotary-position-embeddings, --swiglu: leave it out: "
    assert said["--no-position-embedding"].startswith(needless)
    assert said["--layernorm-epsilon"] == "--layernorm-epsilon: here --norm-epsilon: renamed"
    assert said["--save"].startswith("--save: here --output-path: the run's folder")
    assert said["--optimizer"].startswith("--optimizer: leave it out: AdamW")
    assert said["--data-path"].startswith("--data-path: here --train-data-path: one quoted text")
    assert said["--eval-intervall"] == "--eval-intervall, did you mean --eval-interval?"
    assert said["--xyz"] == "--xyz"
    assert not said.keys() & {"--load", "--lr", "--sequence-parallel", "--tokenizer-type", "0.2"}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("--deepspeed", None), ("--sead", "--seed"), ("--global_batch", "--global-batch-size"),
        ("--num-experts", None), ("--weightdecay", "--weight-decay"), ("--temperature", None),
        ("--dp", None), ("--" + "seed" * 10**4, None),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
    ],
)  # fmt: skip
def test_a_flag_is_meant_where_words_are_near_not_letters(name, ours):
    known = [flag for field in FIELDS.values() for flag in spellings(field)]
    assert nearest_flag(name, known) == (f", did you mean {ours}?" if ours else "")


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("--optimizer", "hybridadam", "--optimizer-offload-policy"), ("--optimizer", "adam", "-"),
        ("--dataset", "JSON-SFT", "--dataset-type"), ("dataset", "", "--train-data-path"),
        ("--tokenizer-type", "GPT2BPETokenizer", "--tokenizer-name-or-path"),
        ("--save", "any", "--output-path"),
        ("--RMSNorm", "", "-"), ("--encoder-num-layers", "3", "-"), ("zero_optimization.stage3_x", "", "-"),
    ],
)  # fmt: skip
def test_answer_is_of_the_value_where_the_table_has_it(name, value, ours):
    assert foreign_flag(name, value).ours == ours


@pytest.mark.parametrize("file", ["zero_optimization: {stage: 2}\nbf16: {enabled: true}", "lora_rank: 8"])
def test_file_of_another_program_is_answered_whole(command, file):
    (command.folder / "theirs.yaml").write_text(file)
    with pytest.raises(ConfigError) as caught:
        command.parse(f"--config={command.folder / 'theirs.yaml'}")
    _, *lines = str(caught.value).split("\n  ")
    wanted = [
        "zero_optimization.stage: here --data-parallel-sharding: 0 none, 1 optimizer, 2 gradients, or auto; "
        "instead of 3: TP, PP, offload",
        "bf16.enabled: here --precision: fp16, or bf16",
    ]
    assert lines == wanted or [line.startswith("lora_rank: not there: LoRA") for line in lines] == [True]


def test_overlapped_optimizer_alone_shards_states(command):
    """As Megatron-LLaMA's readme uses it; an explicit false stays a contradiction."""
    text = to_yaml(command.parse().config).splitlines(keepends=True)
    file = command.folder / "run.yaml"
    file.write_text("".join(line for line in text if "use_distributed_optimizer" not in line))
    argv = ["--config", str(file), "--overlapped-distributed-optimizer"]
    config = parse_args(argv, {}, command.machine).config
    assert config.parallel.use_distributed_optimizer and config.sharding is ZeroStage.GRADIENTS
    with pytest.raises(ConfigError, match="got true, expected --use-distributed-optimizer"):
        validate_run(command.parse("--overlapped-distributed-optimizer", DO="false").config, command.machine)


SHAPE = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 "
    "--train-data-path a --output-path b"
).split()


@pytest.mark.parametrize(
    ("model", "rows"),
    [({"vocab": {"a": 0, "b": 6}}, 9), ({"vocab": [["a", -1.0], ["b", -2.0]]}, 9), (None, 600)],
    ids=["BPE", "unigram", "config.json"],
)
def test_vocabulary_is_the_tokenizers_and_the_base_of_rope_is_not(command, model, rows):
    """RoPE's base in the tokenizer's folder is another model's, so it is asked for."""
    folder = Path(command.hf_folder())
    if model is not None:
        (folder / "config.json").write_text('{"model_type": "another"}')
        tokens = [{"id": 8, "content": "<s>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": tokens}))
    argv = [*SHAPE, f"--tokenizer-name-or-path={folder}"]
    with pytest.raises(ConfigError, match="^missing: --rotary-base .RoPE theta, as --load's model has it"):
        parse_args(argv, {}, command.machine)
    assert parse_args([*argv, "--rotary-base=1e4"], {}, command.machine).config.model.vocab_size == rows


def test_flags_beat_positions_in_both_directions(command):
    config = command.parse(
        "--no-sft", "--sequence-parallel", "--lr=3", "--train-iters=2", "--lr-warmup-iters=1", SP="false"
    ).config
    assert not config.training.sft and config.parallel.sequence_parallel and config.optimizer.lr == 3


def test_flags_alone_name_what_is_missing(command):
    with pytest.raises(ConfigError) as caught:
        parse_args(["--seed=1"], {}, command.machine)
    for wanted in ("missing: ", "--num-layers", "--lr (position 5 LR)", "25 positions"):
        assert wanted in str(caught.value)


def test_empty_command_line_gets_the_positions_in_order(command):
    order = " ".join(position.name for position in POSITIONS)
    with pytest.raises(ConfigError, match=rf"^nothing is given, expected run_mcore_llama.sh {order} "):
        parse_args([], {}, command.machine)


def test_help_shows_positions_then_flags(command, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["dsw", "--help"], {}, command.machine)
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert (
        shown.index("25  OUTPUT_BASEPATH") < shown.index("MP_AC_LAYERS") < shown.index("--micro-batch-size")
    )
    shown = " ".join(shown.split())
    for refused in (
        "9 PR precision of weights and activations fp32|fp16|bf16|fp8",
        "12 CP context parallelism",
        "none|false|sel|full|offload|auto 18 OPTIMIZER_OFFLOAD",
        "--fp8-recipe default|tensorwise|rowwise|delayed|mxfp8|blockwise fp8: scales for whole tensors",
        "default: tensorwise [default] (refused yet: mxfp8, blockwise)",
        "always so (refused yet: --no-distributed-checkpointing)",
    ):
        assert refused in shown, refused
    others = [name for position in POSITIONS for name in position.fields]
    others += [name for name, _ in VARIABLES.values()]
    refused = [row.field for row in NOT_BUILT]
    assert shown.count("refused yet") == len(refused) + sum(name in refused for name in others)
    assert "largest global gradient norm; 0: no clipping [1.0]" in shown


@pytest.mark.parametrize(
    ("argv", "value"), [([], None), (["--tp-comm-overlap"], True), (["--no-tp-comm-overlap"], False)]
)
def test_boolean_that_has_a_third_value_without_its_flags(command, argv, value):
    config = command.parse(*argv, TP="2").config
    assert config.parallel.tp_comm_overlap is value
    written = command.folder / "run.yaml"
    written.write_text(to_yaml(config))
    assert read_run(written) == config


def test_shape_by_flags_alone_derives_the_rest(command):
    argv = (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --vocab-size 500 "
        "--seq-length 32 --max-position-embeddings 64 --rotary-base 1e4 --micro-batch-size 1 "
        "--global-batch-size 1 --train-iters 1 --lr 1 --train-data-path a --output-path b"
    ).split()
    config = parse_args(argv, {}, command.machine).config
    model = config.model
    assert (model.num_query_groups, model.kv_channels, config.data.max_padding_length) == (4, 16, 32)
    assert config.parallel.nproc_per_node == 1
    with pytest.raises(ConfigError, match="--kv-channels is needed: 4 heads do not divide --hidden-size 66"):
        parse_args([("66" if text == "64" else text) for text in argv], {}, command.machine)


def test_config_is_frozen(command):
    with pytest.raises(dataclasses.FrozenInstanceError):
        command.parse().config.optimizer.lr = 1.0


@pytest.mark.parametrize("argv", [["--packing", "true"], ["--packing=true"], ["--no-packing", "false"]])
def test_booleans_take_no_value(argv):
    with pytest.raises(ConfigError, match="'(true|false)' after --.*: --packing is true, --no-packing false"):
        read_flags(argv)


def test_table_of_other_programs_leads_to_flags_that_exist():
    flags = {flag for field in FIELDS.values() for flag in spellings(field)} | {"--config"}
    rows = [row for rows in foreign_flags().values() for row in rows]
    assert len(rows) > 130 and not [row for row in rows if row.ours != "-" and set(row.ours.split()) - flags]
    for row in rows:
        starts = ("leave it out", "not there: ")
        assert row.ours != "-" or row.advice.startswith(starts), row
