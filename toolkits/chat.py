"""llama-patch chat: talk to a trained model, or to any Hugging Face folder, on the terminal.

It takes a Hugging Face folder or the folder of a run: the exported model in hf/, or the adapters merged into
their base. transformers generates, with the chat template of training. An empty line or Ctrl-D ends the
conversation. If stdin is no terminal, its whole text is one question.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkits._arguments import ArgumentParser, exit_code_of, local, positive, typed


def main(argv: list[str]) -> int:
    """Run the command line; returns 0, or the exit code of the error."""
    options = _parse(argv)
    return exit_code_of(lambda: _chat(options))


@contextmanager
def model_folder(folder: Path, adapter: str | None) -> Iterator[Path]:
    """Yield the Hugging Face folder of a run, of a folder itself, or of a base merged with an adapter.

    Merged weights are written to a temporary folder.

    Args:
        folder: a Hugging Face folder, or the OUTPUT_BASEPATH of a run.
        adapter: a PEFT folder or a LoRA run whose base is `folder`; None for the run's own adapters.
    Raises:
        ConfigError: a run without adapters has exported no model.
    """
    from patch.compat import quick_start

    with quick_start():
        from patch.convert import merge_adapter
    from patch.errors import ConfigError
    from patch.preflight.model_of_folder import is_hf_folder, run_behind
    from patch.storage.names import ADAPTER_CONFIG_NAME, HF_FOLDER

    if adapter is None and (found := [each for each in (folder / HF_FOLDER, folder) if is_hf_folder(each)]):
        yield found[0]
        return
    if adapter is None and (folder / ADAPTER_CONFIG_NAME).is_file():
        raise ConfigError(
            f"{folder} has adapters without their base; expected llama-patch chat BASE --adapter {folder}, "
            "or the folder of the run"
        )
    if adapter is None and ((run := run_behind(str(folder))) is None or not run.adapter.lora_rank):
        raise ConfigError(
            f"{folder} has no model to talk to; expected a Hugging Face folder or a run with --export-hf. "
            f"Export the run's checkpoint: llama-patch convert mcore2hf --load {folder} --save HF_DIR"
        )
    with tempfile.TemporaryDirectory(prefix="chat-") as temporary:
        target = Path(temporary) / HF_FOLDER
        merge_adapter(None if adapter is None else folder, adapter or str(folder), target)
        yield target


def _chat(options: argparse.Namespace) -> None:
    with model_folder(options.folder, options.adapter) as folder:
        talk = Conversation(folder, options.system, options.max_new_tokens)
        if not sys.stdin.isatty():
            talk.answer(sys.stdin.read().strip())
            return
        with suppress(EOFError):
            while question := input("> ").strip():
                talk.answer(question)


class Conversation:
    """A conversation with a model, greedy by default; the folder's generation_config.json may sample.

    Args:
        folder: a Hugging Face folder with a tokenizer that has a chat template.
        system: the system message, or None.
        max_new_tokens: the longest answer.
    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, folder: Path, system: str | None, max_new_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, TextStreamer
        from transformers.utils.logging import disable_progress_bar

        from patch.data.chat_templates import ensure_chat_template
        from patch.data.tokenizer import load_tokenizer
        from patch.errors import ConfigError

        self._tokenizer = load_tokenizer(folder)
        ensure_chat_template(self._tokenizer)
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer in {folder} has no chat template; expected the template of training. Add "
                "chat_template.jinja to the folder"
            )
        disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "auto" if device == "cuda" else torch.float32  # bf16 is slow on most CPUs
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        if device == "cpu":
            for parameter in model.parameters():
                if parameter.dtype == torch.bfloat16:  # weights that were stored in fp8
                    parameter.data = parameter.data.float()
        self._model = model.to(device).eval()
        self._streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._messages = [{"role": "system", "content": system}] if system else []
        self._max_new_tokens = max_new_tokens

    def answer(self, question: str) -> str:
        """Print the answer to a question while it is generated, and return it."""
        self._messages = [*self._messages, {"role": "user", "content": question}]
        prompt: Any = self._tokenizer.apply_chat_template(
            self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        inputs = prompt.to(self._model.device)
        tokens = self._model.generate(**inputs, max_new_tokens=self._max_new_tokens, streamer=self._streamer)
        answer = tokens[0, inputs["input_ids"].shape[1] :]
        text = str(self._tokenizer.decode(answer, skip_special_tokens=True))
        self._messages.append({"role": "assistant", "content": text})
        return text


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.chat"), description=__doc__)
    parser.add_argument(
        "folder", type=local, metavar="RUN_OR_HF_FOLDER",
        help="the OUTPUT_BASEPATH of a run, or a Hugging Face folder",
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--adapter", metavar="DIR", help="a PEFT folder, or a LoRA run, of this model")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=512, metavar="N", help="tokens of an answer (512)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
