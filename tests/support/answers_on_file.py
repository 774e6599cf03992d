"""Golden files of answers: a line `$ QUESTION`, then its answer, then a blank line."""

import os
from collections.abc import Callable
from pathlib import Path


def check_answers(file: Path, answer: Callable[[str], str]) -> str:
    """Compare the answer to each question with the file, or write the file if RENEW_GOLDEN is set.

    Returns:
        the text of the file.
    """
    text = file.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("$ ")]
    found = "\n".join(f"{line}\n{answer(line[2:])}\n" for line in lines)
    if os.environ.get("RENEW_GOLDEN"):
        file.write_text(found, encoding="utf-8")
    assert found == text, f"an answer changed: RENEW_GOLDEN=1 renews {file.name}; say so in CHANGELOG"
    return text
