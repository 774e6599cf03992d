"""A run on a machine without enough memory: exit code, one message with a cure, no traceback."""

import resource
from pathlib import Path

import pytest
from end_to_end.conftest import Office
from end_to_end.shell import call, call_workers, command

ADDRESS_SPACE_BYTES = 32 * 2**30
"""Room for torch and megatron-core, also built for CUDA, but not for the embedding below."""
VOCABULARY = 4_000_000
"""At the 405B model's width this takes 131 GB in bf16, allocated at once before any page is touched."""


@pytest.mark.long
def test_out_of_memory_ends_with_5_and_names_what_to_lower(office: Office, tmp_path: Path) -> None:
    large = {"MODEL_SIZE": "405B", "PR": "bf16", "PRETRAIN_CHECKPOINT_PATH": "none"}
    arguments = command(**{**office.positions(tmp_path / "out"), **large})
    arguments += ["--vocab-size", str(VOCABULARY)]
    limit = (resource.RLIMIT_AS, ADDRESS_SPACE_BYTES)
    limited = ["sh", "-c", f'ulimit -v {ADDRESS_SPACE_BYTES // 1024}; exec "$@"', "sh", *arguments, "--force"]
    for result in (
        call_workers(1, arguments, limit, TOKENIZER_PATH=office.model),
        call(limited, NPROC_PER_NODE=1, TOKENIZER_PATH=office.model),
    ):
        assert result.returncode == 5, result.stderr
        assert all(name in result.stderr for name in ("out of memory", "alone take", "more machines"))
        assert not any(name in result.stderr for name in ("BATCH_SIZE)", "AC)", "DO)")), "none would do"
        assert "Traceback" not in result.stderr
        assert result.stderr.count("alone take") == 1
    assert "ERROR to need less memory: the model's state alone takes" in result.stderr
