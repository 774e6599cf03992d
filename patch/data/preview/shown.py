"""What is shown of a set: some of its rows, each with the samples it gives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from patch.data.preview.pieces import Piece, TokenTexts
from patch.data.preview.visible import visible


class ShownToken(NamedTuple):
    """A token of a sample."""

    piece: Piece
    is_learned: bool


def shown_tokens(texts: TokenTexts, ids: np.ndarray, learned: np.ndarray) -> list[ShownToken]:
    """A sample as it is shown.

    Args:
        texts: says what ids stand for.
        ids: integer [S].
        learned: bool [S], whether each is learned.
    """
    return [ShownToken(*pair) for pair in zip(texts.pieces(ids.tolist()), learned.tolist(), strict=True)]


class ShownRow(NamedTuple):
    """A row and what became of it."""

    where: str
    """File and row."""
    samples: list[list[ShownToken]]
    """Empty if the row is dropped."""
    remarks: list[str]
    """What happened to it on the way: dropped, cut, special tokens that became text."""

    def to_json(self) -> dict[str, Any]:
        """The row as plain values: for each sample its ids, their texts, and 1 for those that are learned."""
        return {
            "where": self.where,
            "remarks": self.remarks,
            "samples": [
                {
                    "ids": [token.piece.id for token in sample],
                    "texts": [visible(token.piece.text) for token in sample],
                    "learned": [int(token.is_learned) for token in sample],
                }
                for sample in self.samples
            ],
        }


def lines_of(sample: list[ShownToken]) -> Iterator[list[ShownToken]]:
    """The tokens of a sample in lines: a line ends after a line break in the text, and where learning begins
    or ends, so all tokens of a line are learned, or none is."""
    for _, tokens in groupby(sample, key=lambda token: token.is_learned):
        line: list[ShownToken] = []
        for token in tokens:
            line.append(token)
            if token.piece.text.endswith("\n"):
                yield line
                line = []
        if line:
            yield line
