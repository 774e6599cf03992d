"""Ids and masks are TRL's on the same conversations, for the templates that TRL knows.

TRL names a folder with the package trl and what its import needs, made by `pip install --no-deps --target`
(as .ci/run does); a process of its own takes them from there. TRL patches a published template so that it
marks what the assistant says. Its masks are compared with ours for the patched template, whose marks we use,
and for the published one, in which we look for the answers ourselves.
"""

import copy
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from chats import chat, turns
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import qwen_tokenizer
from transformers import PreTrainedTokenizerFast

from patch.data.formats.rows import to_conversation
from patch.data.formats.turns import Conversation
from patch.data.rendering.chat import ChatRenderer
from patch.data.rendering.spans import SpanEncoder

_FOLDER = os.environ.get("TRL", "")
pytestmark = pytest.mark.skipif(not _FOLDER, reason="TRL names no folder with trl")

FAMILIES = ("llama3", "qwen2_5", "qwen3")
BREAKS = {"llama3": (0, 0), "qwen2_5": (1, 1), "qwen3": (0, 1)}
"""Line breaks at the beginning and end of TRL's marks. The first belongs to the header, which generation has
in its prompt; the second follows the end of the turn, where generation has stopped."""

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CONVERSATIONS = [
    chat(turns("hello", "world")),
    chat(turns("hello", "yes", "what is two plus two?", "four.", "question", "answer", system="be brief")),
    chat(turns("\u4f60\u597d\uff0c\u4e16\u754c", "\u4f60\u597d\uff01\U0001f642")),
    chat(turns("e\u0301", "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd")),
    chat(turns("two\n\nlines", "1. one\n2. two\n", "  blanks  ", "def f(x):\n    return x")),
]  # fmt: skip
WITH_TOOLS = chat(
    [
        *turns("weather?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "name": "get_weather", "content": '{"t": 7}'},
        {"role": "assistant", "content": "It is sunny."},
    ],
    tools=TOOLS,
)
_MASKS = """
import json, sys
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template
found = {}
for name, (folder, rows) in json.load(open(sys.argv[1])).items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    patched = get_training_chat_template(tokenizer)
    assert patched is not None and patched != tokenizer.chat_template
    found[name] = {"patched": patched, "masks": []}
    for messages, tools in rows:
        out = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=patched, return_dict=True, return_assistant_tokens_mask=True
        )
        found[name]["masks"].append([out["input_ids"], out["assistant_masks"]])
json.dump(found, open(sys.argv[2], "w"))
"""


@cache
def published(family: str) -> PreTrainedTokenizerFast:
    template = (Path(_FOLDER) / "trl" / "chat_templates" / f"{family}.jinja").read_text()
    return tiny_tokenizer(template=template) if family == "llama3" else qwen_tokenizer(template)


def rows_of(family: str) -> list[Conversation]:
    """The conversations above, and the first rows of the shared data sets."""
    rows = [*CONVERSATIONS] if family == "llama3" else [*CONVERSATIONS, WITH_TOOLS]
    shared = Path(__file__).resolve().parents[3].parent / "shared" / "data"
    names = ["alpaca_en_demo.json", "alpaca_zh_demo.json"]
    names += [] if family == "llama3" else ["glaive_toolcall_en_demo.json"]
    for name in names:
        if (shared / name).is_file():
            values = [json.loads((shared / name).read_text())[number] for number in range(15)]
            rows += [to_conversation(value, name) for value in values if value.get("output", "x").strip()]
    return rows


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict:
    root, request = tmp_path_factory.mktemp("trl"), {}
    for family in FAMILIES:
        published(family).save_pretrained(root / family)
        request[family] = [str(root / family), [[row.messages, row.tools] for row in rows_of(family)]]
    (root / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, "-c", _MASKS, str(root / "request.json"), str(root / "answer.json")],
        env={**os.environ, "PYTHONPATH": _FOLDER, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((root / "answer.json").read_text())


def ours(tokenizer: PreTrainedTokenizerFast, rows: list[Conversation]) -> list[list[tuple[list, list]]]:
    """Ids and mask of each sample of each row."""
    renderer = ChatRenderer(tokenizer)
    encoder = SpanEncoder(tokenizer)
    return [
        [
            (
                [token for part in ids for token in part],
                [int(span.learned) for span, part in zip(sample, ids, strict=True) for _ in part],
            )
            for sample, ids in zip(samples, encoder.encode(samples), strict=True)
        ]
        for samples in map(renderer.samples, rows)
    ]


def without_breaks(family: str, ids: list[int], mask: list[int]) -> list[int]:
    """TRL's mask less the line breaks that do not belong to the turn (see `BREAKS`)."""
    begin, end = BREAKS[family]
    padded = [0, *mask, 0]
    borders = [index for index in range(len(mask) + 1) if padded[index] != padded[index + 1]]
    cut = [0] * len(mask)
    for first, last in zip(borders[::2], borders[1::2], strict=True):
        line_break = published(family).convert_tokens_to_ids("\u010a")
        assert ids[first : first + begin] == [line_break] * begin
        assert ids[last - end : last] == [line_break] * end
        cut[first + begin : last - end] = [1] * (last - first - begin - end)
    return cut


@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_trls(expected: dict, family: str, is_patched: bool) -> None:
    """Of Qwen 3's published template the last turn: TRL's patch keeps earlier thoughts, which it drops."""
    tokenizer = copy.copy(published(family))
    if is_patched:
        tokenizer.chat_template = expected[family]["patched"]
    own = ours(tokenizer, rows_of(family))
    for samples, (ids, mask) in zip(own, expected[family]["masks"], strict=True):
        mask = without_breaks(family, ids, mask)
        if family == "qwen3" and not is_patched:
            own_ids, own_mask = samples[-1]
            count = len(own_mask) - own_mask.index(1)
            end = len(mask) - mask[::-1].index(1)
            assert all(own_mask[-count:]) and own_ids[-count:] == ids[end - count : end]
            assert all(mask[end - count : end]) and not mask[end - count - 1]
        else:
            ((own_ids, own_mask),) = samples
            assert own_ids == ids[: len(own_ids)] and not any(mask[len(own_ids) :])
            assert own_mask == mask[: len(own_ids)]
