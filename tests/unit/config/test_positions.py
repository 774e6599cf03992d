"""The 25 positions: counts, values, environment variables, and what each becomes."""

import os

import pytest
from refusals import refused

from patch.config.positions import POSITIONS, unknown_variables
from patch.errors import ConfigError


def test_every_position_reaches_its_field(command):
    command.environ.update(MP_AC_LAYERS="2", MP_VP="3", MP_SFT_PACKING="true")
    config = command.parse(
        *("--adam-eps", "1e-7"),
        **dict(MODEL_SIZE="70B", BATCH_SIZE="3", GLOBAL_BATCH_SIZE="5e1", LR="2e-5", MIN_LR="1e-6"),
        **dict(SEQ_LEN="4096", PAD_LEN="2048", PR="bf16", TP="4", PP="2", CP="1", SP="true", DO="true"),
        **dict(FL="false", SFT="true", AC="full", OPTIMIZER_OFFLOAD="auto", SAVE_INTERVAL="7"),
        **dict(DATASET_PATH="a", VALID_DATASET_PATH="b", PRETRAIN_CHECKPOINT_PATH="c"),
        **dict(TRAIN_TOKENS_OR_ITERS="1e3", WARMUP_TOKENS_OR_ITERS="10", OUTPUT_BASEPATH="d"),
    ).config
    model, parallel, training, optimizer = config.model, config.parallel, config.training, config.optimizer
    data, checkpoint = config.data, config.checkpoint
    assert (model.model_size, model.num_layers, model.seq_length) == ("70B", 80, 4096)
    assert model.attention_backend == "fused"
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (4, 2)
    assert parallel.sequence_parallel and parallel.use_distributed_optimizer
    assert parallel.num_layers_per_virtual_pipeline_stage == 3
    assert (training.micro_batch_size, training.global_batch_size, training.train_iters) == (3, 50, 1000)
    assert (training.recompute_granularity, training.recompute_num_layers) == ("full", 2)
    assert training.sft and training.precision == "bf16" and not training.cpu_offloading
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_iters) == (2e-5, 1e-6, 10)
    assert (optimizer.optimizer_offload_policy, optimizer.adam_eps) == ("auto", 1e-7)
    assert (data.train_data_path, data.valid_data_path) == (os.path.abspath("a"), os.path.abspath("b"))
    assert data.max_padding_length == 2048
    assert data.packing and data.dataset_type == "raw"
    assert (checkpoint.load, checkpoint.output_path) == (os.path.abspath("c"), os.path.abspath("d"))
    assert checkpoint.save_interval == 7


@pytest.mark.parametrize(
    ("word", "granularity", "offload"),
    [
        ("none", None, False),
        ("false", None, False),
        ("sel", "selective", False),
        ("offload", None, True),
        ("auto", "auto", False),
    ],
)
def test_ac_words_become_recomputation(command, word, granularity, offload):
    training = command.parse(AC=word).config.training
    assert (training.recompute_granularity, training.cpu_offloading) == (granularity, offload)


@pytest.mark.parametrize(
    ("word", "recomputed", "offloaded"), [("full", 2, None), ("offload", 1, 2), ("sel", 2, None)]
)
def test_layers_of_ac_are_those_that_it_recomputes_or_offloads(command, word, recomputed, offloaded):
    command.environ["MP_AC_LAYERS"] = "2"
    training = command.parse(AC=word).config.training
    assert (training.recompute_num_layers, training.cpu_offloading_num_layers) == (recomputed, offloaded)


def test_tokens_become_whole_iterations_in_pretraining(command):
    del command.environ["MP_DATASET_TYPE"]
    config = command.parse(
        SFT="false", TRAIN_TOKENS_OR_ITERS="5200", WARMUP_TOKENS_OR_ITERS="1100"
    ).config  # a step is 8 x 64 = 512 tokens
    assert (config.training.train_iters, config.optimizer.lr_warmup_iters) == (10, 2)
    assert config.data.dataset_type == "idxmap"


def test_tokens_become_iterations_with_the_batch_a_flag_sets(command):
    config = command.parse(
        "--global-batch-size=16", SFT="false", TRAIN_TOKENS_OR_ITERS="10240", WARMUP_TOKENS_OR_ITERS="0"
    ).config
    assert config.training.train_iters == 10


def test_token_position_gives_way_to_the_flag(command):
    config = command.parse(
        "--train-iters=9", SFT="false", TRAIN_TOKENS_OR_ITERS="1", WARMUP_TOKENS_OR_ITERS="0"
    ).config
    assert config.training.train_iters == 9


def test_fewer_tokens_than_one_step_are_refused(command):
    wanted = "position 23 TRAIN_TOKENS_OR_ITERS: got 511 tokens, expected at least 512"
    with pytest.raises(ConfigError, match=wanted):
        command.parse(SFT="false", TRAIN_TOKENS_OR_ITERS="511", WARMUP_TOKENS_OR_ITERS="0")


@pytest.mark.parametrize(("tokens", "steps"), [("0", 0), ("3", 0), ("511", 0), ("512", 1), ("1535", 2)])
def test_fewer_tokens_of_warmup_than_one_step_are_none_and_one_line_says_so(command, tokens, steps):
    """The line of Pai's article: 10000 tokens, 100 of them warm-up, and a step of 1024."""
    invocation = command.parse(SFT="false", TRAIN_TOKENS_OR_ITERS="5120", WARMUP_TOKENS_OR_ITERS=tokens)
    assert invocation.config.optimizer.lr_warmup_iters == steps
    said = (
        f"position 24 WARMUP_TOKENS_OR_ITERS: {tokens} tokens are no step of warm-up: one step is 8 samples"
    )
    assert [note.startswith(said) for note in invocation.notes] == [True] * (tokens in ("3", "511"))
    flag = command.parse("--lr-warmup-iters=1", SFT="false", TRAIN_TOKENS_OR_ITERS="5120")
    assert flag.config.optimizer.lr_warmup_iters == 1 and not flag.notes


def test_missing_position_is_named(command):
    command_line = command.argv()[:-2]
    with pytest.raises(
        ConfigError, match="got 23 positions, expected 25: position 24 WARMUP.* first missing"
    ):
        _parse(command, command_line)


def test_position_left_out_in_the_middle_is_found_by_its_neighbour(command):
    command_line = command.argv()
    del command_line[8]  # PR
    with pytest.raises(ConfigError, match="does not fit its position is position 9 PR: got '1'"):
        _parse(command, command_line)


def test_position_too_many_is_named(command):
    with pytest.raises(ConfigError, match="got 26 positions, expected 25: 'more' after position 25"):
        _parse(command, [*command.argv(), "more"])


@pytest.mark.parametrize("more", [["4"], ["1", "4"]], ids=["EP", "ETP and EP"])
def test_line_of_pais_scripts_for_experts_is_told_so(command, more):
    line = command.argv()
    with pytest.raises(ConfigError, match=f"'{more[0]}' at position 13 is EP or ETP of Pai-Megatron-Patch's"):
        _parse(command, [*line[:12], *more, *line[12:]])


def _parse(command, argv):
    from patch.preflight.parse import parse_args

    return parse_args(argv, command.environ, command.machine)


BAD_WORDS = {
    "ENV": ("dsv", "dsw, dlc, slurm, did you mean dsw?"),
    "MODEL_SIZE": ("llama2-8B", "did you mean llama2-7B?"),
    "PR": ("bf61", "fp32, fp16, bf16, fp8, did you mean bf16?"),
    "SP": ("True", "true, false, did you mean true?"),
    "DO": ("1", "true, false"),
    "FL": ("yes", "true, false"),
    "SFT": ("", "true, false"),
    "AC": ("fulll", "none, false, sel, full, offload, auto, did you mean full?"),
    "OPTIMIZER_OFFLOAD": ("statik", "false, static, auto, did you mean static?"),
}


@pytest.mark.parametrize("position", POSITIONS, ids=lambda p: p.name)
def test_unknown_value_names_the_position(command, position):
    index = POSITIONS.index(position) + 1
    kinds = {"int": ("1.5", "a whole number"), "float": ("nan", "a finite number"), "path": ("", "a path")}
    bad, expected = BAD_WORDS.get(position.name) or kinds[position.kind]
    with pytest.raises(ConfigError) as caught:
        command.parse(**{position.name: bad})
    message = str(caught.value)
    assert message.startswith(f"position {index} {position.name}: got {bad!r}, expected ")
    assert expected in message


@pytest.mark.parametrize("num_digits", [400, 5000])
def test_number_without_end_names_the_position_in_a_short_line(command, num_digits):
    for position in (position for position in POSITIONS if position.kind in ("int", "float")):
        with pytest.raises(ConfigError) as caught:
            command.parse(**{position.name: "1" * num_digits})
        assert f"{position.name}: got '111" in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["y" * 200] * 40), "half a character \udc00 \ud800"])
@pytest.mark.parametrize("position", ["PRETRAIN_CHECKPOINT_PATH", "OUTPUT_BASEPATH"])
def test_name_that_no_file_has_names_the_position(command, position, path):
    with refused(ConfigError, rf"position \d+ {position}\): got '.*, expected a path of at most 3800 bytes"):
        command.parse(**{position: path})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MP_DATASET_TYPE", "json"),
        ("MP_AC_LAYERS", "1" * 400),
        ("MP_AC_LAYERS", "two"),
        ("MP_VP", "1.5"),
        ("MP_SFT_PACKING", "yes"),
        ("OPTIMIZER_OFFLOAD_FRACTION", "half"),
    ],
)
def test_bad_variable_is_named(command, variable, value):
    command.environ[variable] = value
    with pytest.raises(ConfigError, match=f"environment variable {variable}:"):
        command.parse()


def test_misspelled_variables_are_warned_of():
    environ = {"MP_SFT_PAKING": "true", "MP_VP": "1", "MPI_HOME": "x", "MP_PP0_LAYERS": "3"}
    other, packing = unknown_variables(environ)
    assert other.startswith("environment variable MP_PP0_LAYERS has no effect: it is unknown")
    assert "MP_SFT_PAKING has no effect: it is unknown, did you mean MP_SFT_PACKING?" in packing


@pytest.mark.parametrize("text", ["None", "null", ""])
def test_none_is_offered_where_it_is_legal(command, text):
    with pytest.raises(ConfigError, match="position 21 VALID_DATASET_PATH: got .* expected a path, or none$"):
        command.parse(VALID_DATASET_PATH=text)
