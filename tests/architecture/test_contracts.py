"""Frozen contracts: order of the positions, list of flags, and the resolved values of 25 positions."""

from patch.config import to_yaml
from patch.config.fields import FIELDS
from patch.config.flags import build_parser
from patch.config.positions import POSITIONS
from patch.device import MachineFacts
from patch.preflight.parse import parse_args

ORDER = (
    "ENV MODEL_SIZE BATCH_SIZE GLOBAL_BATCH_SIZE LR MIN_LR SEQ_LEN PAD_LEN PR TP PP CP SP DO FL SFT AC "
    "OPTIMIZER_OFFLOAD SAVE_INTERVAL DATASET_PATH VALID_DATASET_PATH PRETRAIN_CHECKPOINT_PATH "
    "TRAIN_TOKENS_OR_ITERS WARMUP_TOKENS_OR_ITERS OUTPUT_BASEPATH"
)

COMMAND = (
    "dsw 8B 1 16 1e-5 1e-6 4096 2048 bf16 4 2 1 true false true true sel false 100 "
    "/data/train.json /data/valid.json none 1000 100 /runs/first --export-hf --seed 42"
)


def test_positions_keep_their_order():
    assert [position.name for position in POSITIONS] == ORDER.split()


def test_flags_are_frozen(golden):
    lines = []
    for field in FIELDS.values():
        kind = "|".join(field.choices) or {tuple: str}.get(field.kind, field.kind).__name__
        lines.append(
            f"{field.flag} {kind} {'required' if field.required else field.to_scalar(field.default)}"
        )
    golden("flags.txt", "\n".join(lines) + "\n")


def test_every_flag_has_help():
    hidden = [flag for action in build_parser()._actions for flag in action.option_strings if not action.help]
    assert not hidden
    assert not [field.name for field in FIELDS.values() if len(field.help) < 5]


def test_dry_run_of_25_positions_is_frozen(golden):
    environ = {"MP_DATASET_TYPE": "raw", "TOKENIZER_PATH": "/models/tokenizer"}
    invocation = parse_args(COMMAND.split(), environ, MachineFacts(cuda_devices=8, cpu_cores=16))
    golden("dry_run.yaml", to_yaml(invocation.config))
