"""Tiny tokenizers of several kinds, trained quickly: byte-level, four kinds of prefix spaces, Unigram."""

import json
from collections.abc import Callable
from functools import cache, partial

from llama3_tokenizer import CORPUS, GPT2_PATTERN, SPECIAL_TOKENS, tiny_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from toolkits.quickstart.seed_model import LLAMA3_PATTERN

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Qwen's special tokens."""
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens of Qwen 3 that are not special."""
PIECES = [
    "hello", "World", " two", "  spaces ", "\n", "\n\n", "\t", "1234", "\u4f60\u597d", "\u4e16\u754c\u3002",
    "\U0001f642\U0001f469\u200d\U0001f680", "e\u0301\u0323", "\u05e9\u05dc\u05d5\u05dd",
    "\u0645\u0631\u062d\u0628\u0627", "\u202eabc\u202c", "\ufb01", "\x00\x7f", "<", "<|", "|>", "</",
    "<s", ">",     "[INST]", "\u2581", "<0x0A>", *NOT_SPECIAL,
]  # fmt: skip
"""Parts of random texts: several scripts, combining characters, directions, and halves of special tokens."""

QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
SPACE = "\u2581"
SENTENCEPIECE_KINDS = ("legacy", "first", "always", "unigram")
_TEXTS = [*CORPUS, "[INST] question [/INST] answer", "\u4f60\u597d \u4e16\u754c"] * 3


def _core(kind: str, special: list[str]) -> Tokenizer:
    if kind == "unigram":
        core = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        )
    if kind == "legacy":
        core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE,
            prepend_scheme="always" if kind == "always" else "first",
            split=kind == "unigram",
        )
    core.train_from_iterator(_TEXTS, trainer)
    return core


def sentencepiece_tokenizer(
    kind: str, template: str | None = None, special: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer like LLaMA 2's (`legacy`), Mistral's (`first`), T5's (`unigram`), or `always`."""
    core = _core(kind, ["<unk>", "<s>", "</s>", *special])
    core.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    # Bytes were special tokens for training only. In LLaMA 2 they are ordinary tokens.
    if kind != "unigram":
        core = _without_added_bytes(core)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _without_added_bytes(core: Tokenizer) -> Tokenizer:
    described = json.loads(core.to_str())
    described["added_tokens"] = [
        token for token in described["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(described))


def qwen_tokenizer(template: str | None = None, pattern: str = GPT2_PATTERN) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with NFC, ChatML's special tokens and Qwen 3's added ordinary tokens."""
    tokenizer = tiny_tokenizer(pattern, template, [*SPECIAL_TOKENS, *CHATML_TOKENS])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    tokenizer.bos_token = None
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    return tokenizer


def phi_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Phi 3's, whose special tokens absorb the blanks after, or before, them."""
    tokenizer = sentencepiece_tokenizer("legacy")
    tokenizer.add_tokens(
        [
            AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
            AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
            AddedToken("<|mask|>", special=True, normalized=False, lstrip=True),
        ]
    )
    return tokenizer


ZOO: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "llama3": cache(tiny_tokenizer),
    "qwen": cache(qwen_tokenizer),
    "qwen3": cache(partial(qwen_tokenizer, pattern=QWEN_PATTERN)),
    "phi": cache(phi_tokenizer),
    **{kind: cache(partial(sentencepiece_tokenizer, kind)) for kind in SENTENCEPIECE_KINDS},
}
