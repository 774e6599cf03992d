"""`--columns`: which keys of the rows stand for the ones that formats are recognised by."""

from __future__ import annotations

from patch.errors import ConfigError, nearest

COLUMNS_OF_TURNS = ("role", "content")
"""Keys inside each turn of a list of messages."""
COLUMNS = (
    *("messages", *COLUMNS_OF_TURNS, "instruction", "input", "output", "query", "response"),
    *("prompt", "completion", "history", "text", "system", "tools"),
)
"""Every key that can be given another name. `role` and `content` are those inside the turns."""

_SHAREGPT = {"conversations": "messages", "conversation": "messages", "from": "role", "value": "content"}
"""ShareGPT's keys, and ours for the same."""


def parse_columns(text: str | None) -> dict[str, str]:
    """Our name of a key to the name that the rows have: "instruction=question,output=answer".

    Raises:
        ConfigError: a part is not NAME=COLUMN, a name is unknown or given twice.
    """
    columns: dict[str, str] = {}
    for part in text.split(",") if text is not None else ():
        ours, _, theirs = (piece.strip() for piece in part.partition("="))
        if not ours or not theirs:
            example = "expected NAME=COLUMN, such as instruction=question,output=answer"
            raise ConfigError(f"got {part.strip()!r}, {example}", field="columns")
        if ours not in COLUMNS:
            meant = _SHAREGPT.get(ours)
            hint = nearest(ours, list(COLUMNS)) if meant is None else f", did you mean {meant}?"
            raise ConfigError(
                f"got the name {ours!r}, expected one of {', '.join(COLUMNS)}{hint}; the rows' own name "
                "follows the =",
                field="columns",
            )
        if ours in columns:
            raise ConfigError(
                f"got {ours} twice ({columns[ours]}, {theirs}), expected it once", field="columns"
            )
        columns[ours] = theirs
    return columns
