"""The model of a run as a model of lm-evaluation-harness; `answers_to` answers its requests.

Tokenization, truncation and counting follow lm-eval's `hf` model. Generation is greedy and short: each token
takes a forward of the whole text so far, because there is no key/value cache. All unfinished texts share the
rows of that forward. Imports lm_eval, so import this module only where tasks run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from patch.errors import ConfigError
from patch.training.tasks.scoring import Answer, Question

_MOST_NEW_TOKENS = 256
"""lm-eval's default for a task that gives no limit."""


class LiveModel(TemplateLM):
    """A model of any layout, which lm-eval sees as rank 0 of 1, so that it gets all requests.

    lm-eval itself would divide documents over ranks and gather in torch's default group, which also has the
    TP and PP ranks. `answers_to` divides rows more evenly.

    Args:
        max_length: tokens of the model's longest sequence.
        chat: renders a conversation; the bool adds the generation prompt.
    """

    tokenizer_name = ""
    """Empty, because lm-eval caches nothing here."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        ask: Callable[[Sequence[Question]], list[Answer]],
        chat: Callable[[list[dict[str, str]], bool], str],
    ) -> None:
        super().__init__()
        self.tokenizer, self.max_length, self._ask, self._chat = tokenizer, max_length, ask, chat
        begin = tokenizer.bos_token_id
        self._begin = int(self.eot_token_id if begin is None else begin)
        self._begin_text = str(tokenizer.decode([self._begin]))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self._begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize a text; add special tokens unless the text already begins with the begin token."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._begin_text)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation."""
        return self._chat(chat_history, add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        questions = [self._question(context + answer, len(answer)) for _, context, answer in requests]
        return [(answer.log_probability, answer.is_greedy) for answer in self._ask(questions)]

    def _question(self, tokens: list[int], num_asked: int) -> Question:
        """Build the question about the last `num_asked` tokens; a text that is too long loses its start."""
        if not 0 < num_asked <= self.max_length:
            raise ConfigError(
                f"a task asks for {num_asked} tokens at once, expected 1 to {self.max_length}, which is the "
                "model's longest sequence (--max-position-embeddings)",
                field="eval_tasks",
            )
        return Question(tokens[-self.max_length - 1 : -1], tokens[-num_asked:])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows of the model's longest sequence."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            of_text = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, answer in map(make_disjoint_window, of_text):
                windows.append((None, context, answer))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_probability, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += log_probability
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate greedily until a stop word or the end of the text."""
        texts = [_Generation(self, *request.args) for request in requests]
        while running := [text for text in texts if not text.is_over]:
            answers = self._ask([Question(text.tokens, [0]) for text in running])
            for text, answer in zip(running, answers, strict=True):
                text.add(answer.likeliest)
        return [text.said for text in texts]


class _Generation:
    """A text in generation; `options` are the task's generation_kwargs."""

    def __init__(self, model: LiveModel, context: str, options: dict[str, Any]) -> None:
        wanted = normalize_gen_kwargs(options, _MOST_NEW_TOKENS)
        if wanted.get("do_sample"):
            raise ConfigError(
                "a task asks for do_sample, expected greedy generation; set do_sample: false in the task's "
                "generation_kwargs",
                field="eval_tasks",
            )
        self._model, self._left = model, int(wanted["max_gen_toks"])
        room = model.max_length - self._left
        if room <= 0:
            raise ConfigError(
                f"a task generates {self._left} tokens, expected fewer than {model.max_length}, which is the "
                "model's longest sequence (--max-position-embeddings)",
                field="eval_tasks",
            )
        end = str(model.tokenizer.decode([model.eot_token_id]))
        self._stops = handle_stop_sequences(wanted.get("until"), eos=end)
        self.tokens = model.tok_encode(context)[-room:] or [model.prefix_token_id]
        self._new: list[int] = []
        self.is_over = not self._left

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self._new.append(token)
        self._left -= 1
        is_end = token == self._model.eot_token_id
        self.is_over = is_end or not self._left or self._text != self.said

    @property
    def _text(self) -> str:
        return str(self._model.tokenizer.decode(self._new, skip_special_tokens=True))

    @property
    def said(self) -> str:
        """The generated text, up to the first stop word."""
        return str(postprocess_generated_text(self._text, self._stops, None))
