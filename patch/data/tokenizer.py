"""Loads the tokenizer of a Hugging Face folder; checks its ids for training."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer

# LlamaConfig is not used: what loads it with a tokenizer is loaded here, under `quick_start` in a worker.
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase  # noqa: F401

from patch.errors import DataError
from patch.logger import get_logger
from patch.storage.names import TOKENIZER_FILES
from patch.storage.places import StrPath

_logger = get_logger(__name__)

_LARGEST_ID = 1 << 24
"""Limit above any vocabulary's ids; some arrays have an entry for each id."""
_LARGEST_FILE = 1 << 29
"""Bytes of the largest file that is accepted; the file of a tokenizer with 256,000 ids has 40 MB."""


def load_tokenizer(folder: StrPath | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a local folder. Nothing is downloaded, and no code from the folder is run.

    Raises:
        DataError: no folder is given, it does not exist, or it has no tokenizer that transformers can load; a
            file is a pipe, a device or larger than 512 MiB; or an id is above 16,777,216.
    """
    cure, field = "expected the folder of a Hugging Face tokenizer", "tokenizer_name_or_path"
    if folder is None:
        raise DataError(f"tokenizer: no folder is named; {cure}", field=field)
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"tokenizer: {folder} is not a folder; {cure}", field=field)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(f"tokenizer: {folder} has none of {', '.join(TOKENIZER_FILES)}; {cure}", field=field)
    _check_files(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError as error:
        why = " ".join(str(error).split())
        raise DataError(f"{path / 'config.json'}: {why}; expected a file that transformers reads") from error
    except Exception as error:  # noqa: BLE001 - transformers and tokenizers raise plain Exception for bad files
        raise DataError(f"tokenizer: {folder} cannot be loaded: {error}; {cure}", field=field) from error

    if (size := vocabulary_size(tokenizer)) > _LARGEST_ID:
        got = f"{folder} has an id {size - 1}"
        raise DataError(f"tokenizer: {got}, expected at most {_LARGEST_ID}", field=field)
    backend_of(tokenizer)
    return tokenizer


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the `tokenizers.Tokenizer` behind a fast tokenizer, or None if the tokenizer is a slow one. Turn
    off the padding and truncation of its tokenizer.json: they would change the ids of a text, and a padding
    to 1e9 ids would exhaust the memory."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    backend.no_padding()
    backend.no_truncation()
    return backend


def _check_files(folder: Path) -> None:
    """Refuse pipes, devices and huge files: transformers waits for a pipe, and reads files of any size."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if file.suffix not in (".json", ".jinja", ".model", ".txt") or file.is_dir() or not file.exists():
            continue
        if not file.is_file() or file.stat().st_size > _LARGEST_FILE:
            raise DataError(
                f"tokenizer: {file} is a pipe, a device or larger than {_LARGEST_FILE} bytes; expected a "
                "file of a Hugging Face tokenizer"
            )


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one. `len(tokenizer)` is smaller if the ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer with ids for which the model has no embedding.

    Raises:
        DataError: the tokenizer has larger ids than the model has rows; the message names both sizes.
    """
    needed = vocabulary_size(tokenizer)
    if vocab_size > 2 * needed:
        _logger.warning(
            "the model's vocabulary has %d rows, tokenizer %s only %d ids: --vocab-size %d would do",
            vocab_size, tokenizer.name_or_path, needed, needed,
        )  # fmt: skip
    if needed > vocab_size:
        last = tokenizer.convert_ids_to_tokens(needed - 1)
        raise DataError(
            f"tokenizer: {tokenizer.name_or_path} has ids up to {needed - 1} ({last}), the model's "
            f"vocabulary has {vocab_size} rows (--vocab-size is the model's); expected the tokenizer of this "
            "model, without the tokens that were added to it"
        )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of every special token, such as <|eot_id|>."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens})


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of padding. Any id works, because the loss mask excludes padding by position."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return candidate
    return 0
