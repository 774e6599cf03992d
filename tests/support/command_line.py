"""A complete command line over real (tiny) files. Tests change one place of it at a time."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from patch.config import RunConfig, to_yaml
from patch.config.positions import POSITIONS
from patch.device import MachineFacts
from patch.preflight.data_record import SetRecord
from patch.preflight.parse import Invocation, parse_args
from patch.preflight.resume_guard import remember_data

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)

HF_CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "vocab_size": 600,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 128,
    },
}

VALUES = (
    "dsw tiny 2 8 1e-3 1e-4 64 32 fp32 1 1 1 false false true true none false 100 DATA none none 20 2 OUT"
).split()


class Command:
    """Builds argv from a valid command line; its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "rows.json"
        self.data.write_text("[]")
        self.tokenizer = folder / "tokenizer"
        self.tokenizer.mkdir()
        (self.tokenizer / "tokenizer.json").write_text("{}")
        self.environ = {"MP_DATASET_TYPE": "raw", "TOKENIZER_PATH": str(self.tokenizer)}
        self.machine = CPU

    def argv(self, *flags: str, **positions: str) -> list[str]:
        values = dict(zip((p.name for p in POSITIONS), VALUES, strict=True))
        values.update(DATASET_PATH=str(self.data), OUTPUT_BASEPATH=str(self.folder / "out"))
        return [*{**values, **positions}.values(), *flags]

    def parse(self, *flags: str, **positions: str) -> Invocation:
        return parse_args(self.argv(*flags, **positions), self.environ, self.machine)

    def hf_folder(self, **changes: object) -> str:
        """Return a Hugging Face folder with this config.json and a tokenizer, without weights."""
        folder = self.folder / "hf"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
        (folder / "tokenizer.json").write_text("{}")
        return str(folder)


def make_run(folder: Path, config_yaml: str) -> Path:
    """Create the folder of a run whose first checkpoint is complete, judged by file names."""
    iteration = folder / "checkpoint" / "iter_0000010"
    iteration.mkdir(parents=True)
    for name in (".metadata", "common.pt", "metadata.json"):
        (iteration / name).touch()
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("10")
    (folder / "config.yaml").write_text(config_yaml)
    return folder


def begin(config: RunConfig, sets: Sequence[SetRecord] = ()) -> RunConfig:
    """Create a run with a checkpoint at its OUTPUT_BASEPATH."""
    remember_data(config, sets)
    make_run(Path(config.checkpoint.output_path), to_yaml(config))
    return config


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Command]:
    return Command(tmp_path)
