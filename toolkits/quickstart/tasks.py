"""Questions of four small tasks, which a model of 0.16 M parameters can learn.

The tasks: number words to digits, dates to ISO, amounts to currency, and a field of a JSON record. Every
answer follows from its question by a rule. So a right held-out answer shows that the rule was learned.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import date
from typing import Any, NamedTuple

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
_CURRENCIES = {"dollars": "$", "euros": "EUR ", "francs": "CHF ", "rupees": "INR "}
_NAMES = "Ada Ben Chen Dora Emil Fatima Goran Hana Igor Jane Kofi Lena Nora Omar Petra Ravi Sofia".split()
_CITIES = "Oslo Lima Cairo Paris Delhi Accra Quito Kyoto Porto Turin Perth Miami Dakar Riga Bonn Lyon".split()
DATE_INSTRUCTION = "Write as ISO date:"
_TEAMS = "sales legal design finance support research".split()


class Example(NamedTuple):
    """A question of a task, and its only right answer."""

    task: str
    instruction: str
    input: str
    answer: str

    @property
    def question(self) -> str:
        """Message of the user. The alpaca reader joins instruction and input in the same way."""
        return f"{self.instruction}\n{self.input}"


def number_words(number: int) -> str:
    """Return the English words of 1 to 99,999, such as "forty-two thousand one hundred five"."""
    if number >= 1000:
        rest = number % 1000
        return number_words(number // 1000) + " thousand" + (f" {number_words(rest)}" if rest else "")
    if number >= 100:
        rest = number % 100
        return f"{_ONES[number // 100]} hundred" + (f" {number_words(rest)}" if rest else "")
    if number >= 20:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    return _ONES[number]


def _number(rng: random.Random) -> Example:
    number = rng.randrange(1, 10 ** rng.randint(2, 5))
    return Example("number", "Write in digits:", number_words(number), str(number))


def _date(rng: random.Random) -> Example:
    day = date.fromordinal(rng.randrange(date(1950, 1, 1).toordinal(), date(2050, 1, 1).toordinal()))
    forms = ("{0:%B} {0.day}, {0.year}", "{0.day} {0:%B} {0.year}", "{0.day} of {0:%B}, {0.year}")
    spelled = rng.choice(forms).format(day)
    return Example("date", DATE_INSTRUCTION, spelled, day.isoformat())


def _currency(rng: random.Random) -> Example:
    unit = rng.choice(list(_CURRENCIES))
    cents = rng.randrange(1, 10 ** rng.randint(3, 7))
    # Whole amounts and tenths may be written short, as in everyday texts.
    spelled = rng.choice((f"{cents // 100}", f"{cents // 10 / 10:.1f}", f"{cents / 100:.2f}"))
    answer = f"{_CURRENCIES[unit]}{float(spelled):,.2f}"
    return Example("currency", "Write as currency:", f"{spelled} {unit}", answer)


def _field(rng: random.Random) -> Example:
    record: dict[str, Any] = {
        "name": rng.choice(_NAMES),
        "city": rng.choice(_CITIES),
        "team": rng.choice(_TEAMS),
        "age": rng.randint(18, 80),
    }
    keys = rng.sample(list(record), 3)
    wanted = rng.choice(keys)
    text = json.dumps({key: record[key] for key in keys})
    return Example("field", f"Read the {wanted}:", text, str(record[wanted]))


TASKS: tuple[Callable[[random.Random], Example], ...] = (_number, _date, _currency, _field)


def make_examples(*, num_train: int, num_held_out: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Return training and held-out examples, the same number of each task.

    No held-out question occurs in training. No held-out answer occurs in training with another question,
    except for fields, which have few different answers.
    """
    rng = random.Random(seed)
    held_out: dict[str, Example] = {}
    while len(held_out) < num_held_out:
        example = TASKS[len(held_out) % len(TASKS)](rng)
        held_out.setdefault(example.question, example)
    closed_answers = {(each.task, each.answer) for each in held_out.values() if each.task != "field"}
    train: list[Example] = []
    while len(train) < num_train:
        example = TASKS[len(train) % len(TASKS)](rng)
        if example.question not in held_out and (example.task, example.answer) not in closed_answers:
            train.append(example)
    return train, list(held_out.values())


def to_row(example: Example, index: int) -> dict[str, Any]:
    """Return the example as a raw JSON row, alternately with alpaca keys and with OpenAI messages."""
    if index // len(TASKS) % 2 == 0:
        return {"instruction": example.instruction, "input": example.input, "output": example.answer}
    turns = (("user", example.question), ("assistant", example.answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
