"""Covering array: rows of values in which every legal pair of two columns' values occurs at least once.

    columns = {"TP": ["1", "2"], "SP": ["no", "yes"], ...}
    rules = [Rule(("TP", "SP"), lambda tp, sp: tp == "2" or sp == "no"), ...]
    missing = legal_pairs(columns, rules) - pairs_of(rows)
    more = further_rows(columns, rules, missing)

A pair is legal if a row that no rule forbids contains it.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Columns = dict[str, Sequence[str]]
"""Column -> its values."""
Row = dict[str, str]
"""Column -> its value in this row."""
Pair = frozenset[tuple[str, str]]
"""Two columns with one value each."""
ATTEMPTS = 40


class Rule(NamedTuple):
    """Legal combinations of some columns' values."""

    columns: tuple[str, ...]
    allows: Callable[..., bool]
    """Called with one value for each of the columns."""


def is_legal(row: Row, rules: Iterable[Rule]) -> bool:
    """Return whether all rules allow the row, which must have all columns that the rules name."""
    return all(rule.allows(*(row[column] for column in rule.columns)) for rule in rules)


def pairs_of(rows: Iterable[Row]) -> set[Pair]:
    return {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}


def all_pairs(columns: Columns) -> set[Pair]:
    cells = [[(column, value) for value in values] for column, values in columns.items()]
    return {frozenset(pair) for a, b in itertools.combinations(cells, 2) for pair in itertools.product(a, b)}


def legal_pairs(columns: Columns, rules: Sequence[Rule]) -> set[Pair]:
    return {pair for pair in all_pairs(columns) if _is_possible(dict(pair), columns, rules)}


def further_rows(columns: Columns, rules: Sequence[Rule], missing: set[Pair]) -> list[Row]:
    """Return legal rows that contain all missing pairs, each with as many of them as are found.

    Deterministic: the same columns give the same rows.
    """
    chance, rows, left = random.Random(0), list[Row](), set(missing)
    while left:
        first = min(left, key=sorted)
        attempts = [_row_with(first, columns, rules, left, chance) for _ in range(ATTEMPTS)]
        rows.append(max(attempts, key=lambda row: len(left & pairs_of([row]))))
        left -= pairs_of(rows[-1:])
    return rows


def _is_possible(cells: Row, columns: Columns, rules: Sequence[Rule]) -> bool:
    """Return whether a legal row contains these cells. Columns with few values left are tried first."""
    unknown = [[column for column in rule.columns if column not in cells] for rule in rules]
    if not is_legal(cells, [rule for rule, left in zip(rules, unknown, strict=True) if not left]):
        return False
    if not any(unknown):
        return True
    decided = {left[0] for left in unknown if len(left) == 1} or {min(filter(None, unknown), key=len)[0]}
    following = [_further_cells(cells, column, columns[column], rules) for column in decided]
    return any(_is_possible(row, columns, rules) for row in min(following, key=len))


def _further_cells(cells: Row, column: str, values: Sequence[str], rules: Sequence[Rule]) -> list[Row]:
    """Return the cells with one more column, without those that a complete rule forbids."""
    known = {*cells, column}
    of_column = [rule for rule in rules if column in rule.columns and known >= {*rule.columns}]
    rows = [cells | {column: value} for value in values]
    return [row for row in rows if is_legal(row, of_column)]


def _row_with(
    pair: Pair, columns: Columns, rules: Sequence[Rule], left: set[Pair], chance: random.Random
) -> Row:
    """Return a legal row with this pair. Other columns take the values with most missing pairs."""
    row = dict(pair)
    for column in chance.sample(list(columns), len(columns)):
        if column not in row:
            values = [v for v in columns[column] if _is_possible(row | {column: v}, columns, rules)]
            gains = {
                value: sum(frozenset([(column, value), cell]) in left for cell in row.items())
                for value in values
            }
            best = max(gains.values())
            row[column] = next(value for value in values if gains[value] == best)
    return {column: row[column] for column in columns}
