"""llama-patch inspect: the content of a checkpoint, whether it is intact, and how two checkpoints differ.

It builds no model and executes no code from a checkpoint. Exit code 0: intact, and equal to the second
checkpoint; 1: intact, but different; 4: damaged, or not a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkits._arguments import ArgumentParser, console, exit_code_of, output_file, typed

if TYPE_CHECKING:
    from patch.checkpoint.compare import Comparison
    from patch.checkpoint.inspect import Inspection


def main(argv: list[str]) -> int:
    """Run the command line; return 0, 1 if two checkpoints differ, 4, or the exit code of another error."""
    options = _parse(argv)
    return exit_code_of(lambda: _run(options.folders, options.json))


_MARKS = ".metadata *data.json *sums.json common.pt *.distcp iter_* release mp_rank_* latest_*.txt".split()
"""File names in checkpoints and in folders of checkpoints, including damaged ones."""


def _refuse_other_folder(load: Path) -> None:
    """Refuse a folder without a checkpoint before the import of torch, which takes seconds."""
    from patch.errors import CheckpointError
    from patch.storage.names import find_checkpoint_root

    if not any(any(place.glob(mark)) for place in (load, find_checkpoint_root(load)) for mark in _MARKS):
        kind = "a run's folder, its checkpoint/, or one of Megatron-LM"
        is_hf = (load / "config.json").is_file()
        hint = ". It is a Hugging Face folder, which --load takes as it is" if is_hf else ""
        raise CheckpointError(f"{load} has no checkpoint, expected {kind}{hint}")


def _run(folders: list[str], file: Path | None) -> int:
    from patch.storage.places import any_path

    for path in map(any_path, folders):
        if isinstance(path, Path):
            _refuse_other_folder(path)
    from patch.checkpoint.compare import compare
    from patch.checkpoint.inspect import find_stored, inspect, num_bytes_of
    from patch.progress import progress

    report: dict[str, Any] = {"checkpoints": []}
    screen, readers = _Screen(), []
    for load in folders:
        folder = find_stored(any_path(load))
        with progress(f"checking {folder.name}", num_bytes_of(folder)) as advance:
            inspection, reader = inspect(folder, advance)
        report["checkpoints"].append(asdict(inspection))
        readers.append(reader)
        screen.show(inspection)
    code = 4 if any(each["complaints"] for each in report["checkpoints"]) else 0
    if len(folders) == 2 and readers[0] is not None and readers[1] is not None and code == 0:
        total = sum(tensor.num_bytes for tensor in readers[0].tensors.values())
        with progress("comparing", total) as advance:
            comparison = compare(readers[0], readers[1], advance)
        report["comparison"] = asdict(comparison)
        screen.show_comparison(comparison)
        code = 0 if comparison.is_equal else 1
    if file is not None:
        file.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    return code


class _Screen:
    """Lines and tables as wide as the terminal. Control characters in a file's text are escaped."""

    def __init__(self) -> None:
        self._console = console()

    def show(self, found: Inspection) -> None:
        """Print a checkpoint."""
        from patch.text import size_text

        self._say(found.folder, "bold")
        self._say(f"  format: {found.format}, saved {found.saved}")
        for name, value in found.facts.items():
            pairs = value.items() if isinstance(value, dict) else ()
            self._say(f"  {name}: {', '.join(f'{key} {each}' for key, each in pairs) or value}")
        rows, groups = [], Counter[str]()
        for each in found.tensors:
            shape, size = " x ".join(map(str, each.shape)) or "scalar", size_text(each.num_bytes)
            rows.append((each.name, shape, each.dtype, str(each.num_tensors), size))
            groups[each.group] += each.num_bytes
        self._table(("tensors", "shape", "type", "number", "size"), rows)
        for group, num_bytes in groups.items():
            self._say(f"  {group}: {size_text(num_bytes)}")
        if found.num_objects:
            self._say(f"  and {found.num_objects} opaque objects, not read")
        if verified := [file for file in found.files if file.is_verified]:
            whole = sum(file.complaint is None for file in verified)
            size = size_text(sum(file.num_bytes for file in verified))
            self._say(f"  checksums: {whole} of {len(verified)} files are what was saved, {size}")
        else:
            self._say("  checksums: it has none; the lengths of its files are checked")
        for complaint in found.complaints:
            self._say(f"  DAMAGED {complaint}", "bold red")
        for other in found.neighbours:
            note = f" ({other.note})" if other.note else ""
            self._say(f"  in its folder: {other.name}, {size_text(other.num_bytes)}{note}", "dim")

    def show_comparison(self, found: Comparison) -> None:
        """Print how two checkpoints differ."""
        self._say("comparison", "bold")
        self._say(f"  {found.num_equal} tensors are equal to the bit")
        rows = []
        for each in found.differences:
            shapes = zip((each.first, each.second), each.dtypes, strict=True)
            sides = [f"{' x '.join(map(str, shape))} {dtype}" for shape, dtype in shapes]
            largest = "nan" if each.largest is None else f"{each.largest:.6g}"
            rows.append((each.name, *sides, str(each.num_different), largest))
        self._table(("tensors that differ", "first", "second", "elements", "largest difference"), rows)
        for which, names in (("first", found.only_first), ("second", found.only_second)):
            for name in names:
                self._say(f"  only in the {which}: {name}")
        if found.common_values:
            self._say(f"  other values that differ: {', '.join(found.common_values)}")

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(_visible(text), style=style)

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table

        table = Table(box=None, pad_edge=True)
        for number, column in enumerate(columns):
            table.add_column(column, overflow="fold", justify="right" if number > 2 else "left")
        for row in rows:
            table.add_row(*map(_visible, row))
        if rows:
            self._console.print(table)


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.inspect_checkpoint"), description=__doc__)
    parser.add_argument(
        "folder", metavar="DIR",
        help="a run's folder, its checkpoint/ or URL (--save), one checkpoint in it, a converted one, or "
        "one of Megatron-LM",
    )  # fmt: skip
    parser.add_argument(
        "second", nargs="?", metavar="DIR2", help="compare with this one, saved in any layout"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write all of this as JSON")
    options = parser.parse_args(argv)
    options.folders = [folder for folder in (options.folder, options.second) if folder is not None]
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
