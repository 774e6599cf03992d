"""LLaMA-3 tokenizers for tests: a tiny one, trained quickly, and the real one of llama-models."""

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from toolkits.quickstart.seed_model import LLAMA3_PATTERN

# Its last alternatives may merge a header's final line break with the following text.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL_TOKENS = [
    BEGIN, END, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
    "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
]  # fmt: skip

CORPUS = (
    "the quick brown fox jumps over the lazy dog\n\n",
    "what is two plus two? four. 1234 5678\n\n",
    *(f"{word}\n\n" for word in "user assistant system hello world answer question yes no".split()),
)


def tiny_tokenizer(
    pattern: str = LLAMA3_PATTERN, template: str | None = None, special: Iterable[str] = SPECIAL_TOKENS
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of at most 400 ids, special tokens first. It can add begin-of-text."""
    core = Tokenizer(models.BPE())
    _dress(core, pattern)
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return _wrap(core, template)


def build_tiny_tokenizer(folder: Path, template: str | None = None) -> None:
    """Save `tiny_tokenizer` as a Hugging Face folder."""
    tiny_tokenizer(template=template).save_pretrained(folder)


def build_llama3_tokenizer(folder: Path) -> None:
    """Write the real LLaMA-3 tokenizer as a Hugging Face folder: 128,256 ids, no chat template.

    It converts the tokenizer.model of the package llama-models. Without this package the test is skipped.
    """
    package = importlib.util.find_spec("llama_models")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llama-models is not installed")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    model = Path(package.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    named = [*SPECIAL_TOKENS, "<|image|>"]
    reserved = [f"<|reserved_special_token_{2 + index}|>" for index in range(256 - len(named))]
    core = TikTokenConverter(str(model), extra_special_tokens=named + reserved).converted()
    _wrap(core, None).save_pretrained(folder)
    # Name of this class in transformers 4 and in LLaMA's own repositories.
    config = folder / "tokenizer_config.json"
    described = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(described, indent=2))


def _dress(core: Tokenizer, pattern: str) -> None:
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()


def _wrap(core: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN} $A",
                pair=f"{BEGIN} $A {BEGIN} $B",
                special_tokens=[(BEGIN, core.token_to_id(BEGIN))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
