"""Write a small tokenizer and a small random model as a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE

BEGIN, END, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
HEADER, END_OF_HEADER, PADDING = "<|start_header_id|>", "<|end_header_id|>", "<|finetune_right_pad_id|>"
VOCAB_SIZE = 640

# Source: the split pattern of LLaMA-3's tokenizer.json.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(
    folder: Path, texts: Iterable[str], vocab_size: int = VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with LLaMA-3's special tokens and chat template, and save it.

    Digits are removed from the training texts, so no merge of digits is learned. The split pattern groups up
    to three digits, but each digit stays a token of its own, which a tiny model needs to count places.

    Args:
        texts: training texts.
        vocab_size: largest number of tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, HEADER, END_OF_HEADER, END_OF_TURN, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((re.sub(r"\d", "", text) for text in texts), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        padding_side="left",
        chat_template=LLAMA3_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
    return wrapped


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    """Save a very small LLaMA-3.1: GQA, llama3 RoPE scaling, untied embeddings, 0.16 M parameters.

    Args:
        tokenizer: gives the vocabulary size and the ids of the special tokens.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
