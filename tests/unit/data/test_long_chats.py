"""Long conversations: the pieces that every prefix of them gives."""

import random
from itertools import cycle, islice

import chat_template_families as families
import pytest
from chats import chat
from llama3_tokenizer import SPECIAL_TOKENS, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from patch.data.chat_templates import BUILT_IN
from patch.data.rendering.chat import ChatRenderer
from patch.data.rendering.spans import Span, unmarked

ENDS = ("<|eot_id|>", "<|im_end|>", "</s>", "<end_of_turn>", "<|end_of_text|>")
SPECIAL = [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>", "</s>", "<start_of_turn>", "<end_of_turn>"]

# Each turn knows its number, so that none can be written without those before it.
NUMBERED = (
    "{% for m in messages %}{{ loop.index ~ m.role ~ ': ' ~ m.content ~ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ (messages | length + 1) ~ 'assistant: ' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {
    "marks": BUILT_IN["llama3"],
    "chatml": families.QWEN25,
    "header": families.LLAMA31,
    "no prompt": families.LLAMA2,
    "gemma": GEMMA,
    "numbered": NUMBERED,
}


def conversation(turns: int, *, seed: int, system: bool = False) -> list[dict[str, str]]:
    """User and assistant by turns; some contents empty, equal, or like what a template writes."""
    pick = random.Random(seed)
    words = ["hello", "", " ", "two\n\nlines", "\u4f60\u597d", "a<|eot_id|>b", "9assistant: ", "x " * 40]
    said = [{"role": "system", "content": "be brief"}] if system else []
    roles = islice(cycle(("user", "assistant")), turns)
    return said + [{"role": role, "content": pick.choice(words)} for role in roles]


def from_every_prefix(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[Span]:
    """The definition, by transformers alone: an answer is what its prompt lacks, to the end of its turn.

    An answer without words belongs to the prompt of the next one.
    """

    def write(count: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

    spans: list[Span] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and (words := message["content"].strip()):
            prompt, answered = write(index, True), write(index + 1, False)
            start = answered.index(words, len(prompt)) + len(words)
            end = min(place + len(mark) for mark in ENDS if (place := answered.find(mark, start)) >= 0)
            spans += [Span(prompt[len(done) :], False), Span(answered[len(prompt) : end], True)]
            done = answered[:end]
    return spans


def pieces(renderer: ChatRenderer, messages: list[dict[str, str]]) -> list[Span]:
    """What the renderer makes of a conversation that becomes one sample, or none; turns are not divided."""
    samples = renderer.render(chat(messages))
    assert len(samples) <= 1
    found: list[Span] = []
    for span in (span for sample in samples for span in sample):
        if span.begins_user_turn:
            found[-1] = found[-1]._replace(text=found[-1].text + unmarked(span.text))
        else:
            found.append(span._replace(text=unmarked(span.text)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_are_those_of_every_prefix(name: str) -> None:
    tokenizer = tiny_tokenizer(template=TEMPLATES[name], special=SPECIAL)
    renderer = ChatRenderer(tokenizer)
    for seed, turns in enumerate((1, 2, 5, 6, 7, 8, 9, 17, 30, 41)):
        messages = conversation(turns, seed=seed, system=seed % 2 == 1)
        assert pieces(renderer, messages) == from_every_prefix(tokenizer, messages), (seed, turns)
