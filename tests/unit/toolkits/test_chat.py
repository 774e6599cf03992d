"""Chat: the answers are those of transformers' generate with the folder's template."""

import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkits.chat import main
from toolkits.quickstart.seed_model import write_model, write_tokenizer

SYSTEM = "Answer briefly."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    texts = ["user\n\nHow are you?", "assistant\n\nwell, thanks"]
    write_model(path, write_tokenizer(path, texts * 50), seed=3)
    return path


def generated(folder: Path, messages: list[dict[str, str]]) -> str:
    """The oracle: greedy tokens by the largest logit, one by one, without generate and its cache."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    tokens = prompt["input_ids"]
    for _ in range(5):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def chat(*words: object, question: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    return main([*map(str, words), "--max-new-tokens", "5"])


@pytest.mark.parametrize("system", [None, SYSTEM])
def test_stdin_is_one_question(folder, system, monkeypatch, capsys):
    asked = [{"role": "user", "content": "How are you?"}]
    words = [folder] if system is None else [folder, "--system", system]
    assert chat(*words, question="How are you?\n", monkeypatch=monkeypatch) == 0
    expected = generated(folder, [*([{"role": "system", "content": SYSTEM}] if system else []), *asked])
    assert capsys.readouterr().out.strip() == expected.strip() != ""


def test_a_run_answers_with_its_exported_model(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "hf").symlink_to(folder)
    assert chat(tmp_path, question="How are you?", monkeypatch=monkeypatch) == 0
    in_run = capsys.readouterr().out
    assert chat(folder, question="How are you?", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == in_run


def test_a_folder_without_a_model_is_refused(tmp_path, monkeypatch, capsys):
    assert chat(tmp_path, question="?", monkeypatch=monkeypatch) == 2
    assert "expected a Hugging Face folder or a run with --export-hf" in capsys.readouterr().err
