"""Named flags: types, unknown and doubled ones, --help."""

import json
import re
from pathlib import Path

import pytest
from refusals import refused

from patch.config.choices import ZeroStage
from patch.config.fields import FIELDS, SECTIONS, coerce
from patch.config.flags import spellings
from patch.config.foreign_flags import (
    foreign_defaults,
    foreign_flag,
    foreign_flags,
    nearest_flag,
    plain_name,
)
from patch.config.positions import POSITIONS
from patch.config.yaml_io import to_yaml
from patch.errors import ConfigError
from patch.preflight.parse import parse_args


def test_number_without_end_is_refused_in_a_short_line(command):
    names = [each.name for each in POSITIONS if each.kind in ("int", "float")]
    given = [([], {name: "1" * digits}, name) for name in names for digits in (400, 5000)]
    given += [([f"{flag}={'1' * 5000},0"], {}, flag) for flag in ("--seed", "--window-size")]
    for flags, positions, name in given:
        with refused(ConfigError, f"{name}.*: got '111") as caught:
            command.parse(*flags, **positions)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["y" * 200] * 40), "half a character \udc00 \ud800"])
@pytest.mark.parametrize("position", ["PRETRAIN_CHECKPOINT_PATH", "OUTPUT_BASEPATH"])
def test_name_that_no_file_has_names_the_position(command, position, path):
    with refused(ConfigError, rf"position \d+ {position}\): got '.*, expected a path of at most 3800 bytes"):
        command.parse(**{position: path})


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("--deepspeed", None), ("--sead", "--seed"), ("--global_batch", "--global-batch-size"),
        ("--num-shards", None), ("--weightdecay", "--weight-decay"), ("--temperature", None),
        ("--dp", None), ("--" + "seed" * 10**4, None),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
    ],
)  # fmt: skip
def test_a_flag_is_meant_where_words_are_near_not_letters(name, ours):
    known = [flag for field in FIELDS.values() for flag in spellings(field)]
    assert nearest_flag(name, known) == (f", did you mean {ours}?" if ours else "")


def test_answer_is_of_the_value_where_the_table_has_it():
    """A value without a row gets no advice of another value."""
    rows = Path(__file__).with_name("foreign_answers.txt").read_text().splitlines()[1:]
    for row in rows:
        given, _, expected = row.partition(" => ")
        name, value = given.split()
        found = foreign_flag(name, "" if value == "-" else value)
        assert found.ours == expected or found.answer.startswith(expected), row


def test_overlapped_optimizer_alone_shards_states(command):
    text = to_yaml(command.parse().config).splitlines(keepends=True)
    file = command.folder / "run.yaml"
    file.write_text("".join(line for line in text if "use_distributed_optimizer" not in line))
    argv = ["--config", str(file), "--overlapped-distributed-optimizer"]
    config = parse_args(argv, {}, command.machine).config
    assert config.parallel.use_distributed_optimizer and config.sharding is ZeroStage.GRADIENTS


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


@pytest.mark.parametrize(("style", "meant"), [("wsd", "WSD"), ("Cosine", "cosine"), ("linaer", "linear")])
def test_a_choice_is_meant_in_any_case_of_its_letters(command, style, meant):
    with refused(ConfigError, rf"--lr-decay-style: got '{style}', .*, did you mean {meant}\?"):
        command.parse("--lr-decay-style", style)


def test_help_shows_positions_then_flags(command, capsys):
    topics = {}
    for topic in ("", "positions", "all", *SECTIONS):
        with pytest.raises(SystemExit) as caught:
            parse_args(["dsw", "--help", *topic.split()], {}, command.machine)
        assert caught.value.code == 0
        topics[topic] = capsys.readouterr().out
    assert len(topics[""].splitlines()) < 105 and all(f"--help {name}" in topics[""] for name in topics)
    for field in FIELDS.values():
        assert {field.flag} <= {*topics[field.section].split()} & {*topics["all"].split()}
    assert "--lr " in topics[""] and "--lr " not in topics["data"] and "25  OUTPUT" in topics["positions"]
    with refused(ConfigError, "--help: got 'optimzer', expected one of positions, all, model"):
        parse_args(["--help", "optimzer"], {}, command.machine)
    shown = topics["all"]
    assert (
        shown.index("25  OUTPUT_BASEPATH") < shown.index("MP_AC_LAYERS") < shown.index("--micro-batch-size")
    )
    shown = " ".join(shown.split())
    for part in (
        "9 PR precision of weights and activations fp32|fp16|bf16|fp8",
        "12 CP context parallelism",
        "none|false|sel|full|offload|auto 18 OPTIMIZER_OFFLOAD",
        "--fp8-recipe default|tensorwise|delayed|rowwise|mxfp8|blockwise fp8: one scale a tensor",
        "default: tensorwise (rowwise, mxfp8, blockwise are refused) [default]",
        "always so (refused yet: --no-distributed-checkpointing)",
    ):
        assert part in shown, part
    assert "largest global gradient norm; 0: no clipping [1.0]" in shown


def test_shape_by_flags_alone_derives_the_rest(command):
    argv = [*SHAPE, "--vocab-size=500", "--rotary-base=1e4"]
    config = parse_args(argv, {}, command.machine).config
    model = config.model
    assert (model.num_query_groups, model.kv_channels, config.data.max_padding_length) == (4, 16, 32)
    assert config.parallel.nproc_per_node == 1
    with pytest.raises(ConfigError, match="--kv-channels is needed: 4 heads do not divide --hidden-size 66"):
        parse_args([("66" if text == "64" else text) for text in argv], {}, command.machine)


@pytest.mark.long
def test_table_of_other_programs_leads_to_flags_that_exist():
    flags = {flag for field in FIELDS.values() for flag in spellings(field)}
    flags |= {"--config", "--deepspeed-config"}
    rows = [(row, program) for program, rows in foreign_flags().items() for row in rows]
    assert len(rows) > 400
    rows += [(row, "") for program in foreign_flags() for row in foreign_defaults(program)]
    for row, program in rows:
        known = flags | {"--dry-run", "--help", "--distill-to"}
        starts = ("remove it: ", "not there: ", "not supported at this value: ")
        assert not set(row.ours.split()) - flags or row.ours == "-" and row.advice.startswith(starts), row
        value = row.value if program else row.advice
        if row.ours != "-" and re.fullmatch(r"[\w.,-]+\w", value):  # a value as it is
            parts = value.split(",") if len(row.ours.split()) > 1 and "," in value else [value]
            for flag, part in zip(row.ours.split(), parts * 2, strict=False):
                coerce(FIELDS[flag.replace("--no-", "--")[2:].replace("-", "_")], part, row.theirs)
        assert not set(re.findall("--[a-z][a-z0-9-]*", row.advice)) - known, row
        names = {f"--{plain_name(name)}" for name in row.theirs.split(", ")}
        assert not (row.advice.startswith("not there") and names & flags), row
        for part in row.theirs.replace("*", "x").split(", ") if program else ():
            name, _, value = re.sub("[ :=]+", " ", part, count=1).partition(" ")
            assert foreign_flag(name, value.replace("X", "any") or "any", program) is row, part
