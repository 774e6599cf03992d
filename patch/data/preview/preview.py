"""What a user sees of a run's training data: rows as tokens and figures of each set, printed and as files.

How many samples a set has is said as far as that can be known before the run: those of .bin/.idx follow from
the .idx; those of rows are in the token cache, and a small set is tokenized at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DataPart, files_of, format_data, parse_data
from patch.config.schema import DataConfig, ModelConfig
from patch.data.chat_templates import ensure_chat_template
from patch.data.preview.rows import first_items, numbered_items, shown_rows
from patch.data.preview.shown import ShownRow
from patch.data.preview.statistics import Figures, SetStatistics
from patch.data.preview.terminal import print_legend, print_row, print_statistics, terminal
from patch.data.sft.options import sft_options
from patch.data.sft.source import load_sft
from patch.data.tokenizer import check_vocabulary, load_tokenizer
from patch.errors import ConfigError, about
from patch.storage.names import DATA_CACHE_FOLDER
from patch.storage.sizes import counted

if TYPE_CHECKING:
    from patch.data.preview.indexed import IndexedPreview
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from patch.data.packing import pack
from patch.data.preview.pieces import Piece
from patch.data.preview.shown import INNER_BORDER, lines_of, visible, visible_name
from patch.data.sft.source import find_sft

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#010203"
"""A colour that nothing else has; the page's own text colour takes its place."""
_BAR = "#2f8f4e"
_LIMIT = "#c05020"


def svg(sets: Sequence[Figures]) -> str:
    """The histograms as an <svg> element that loads nothing, in the colour of the text around it."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    picture = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "preview"}):
        figure = _figure(sets)
        figure.patch.set_alpha(0)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(picture, metadata=nothing)
    text = picture.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def _figure(sets: Sequence[Figures]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 2.6 * len(sets)), layout="constrained")
    for number, each in enumerate(sets, start=1):
        axes = figure.add_subplot(len(sets), 1, number)
        axes.stairs(each.lengths.counts, each.lengths.edges, fill=True, color=_BAR)
        limit = ""
        if each.capacity is not None:
            axes.axvline(each.capacity, color=_LIMIT, linestyle="--")
            limit = f" (the line: {each.capacity} fit)"
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        # The font has few other characters.
        name = visible_name(each.name).encode("ascii", "backslashreplace").decode()
        axes.set_title(name, color=_INK, parse_math=False)
        axes.set_xlabel(f"tokens of a {each.counted}{limit}", color=_INK)
        axes.set_ylabel(f"{each.counted}s", color=_INK)
        axes.tick_params(colors=_INK)
        axes.patch.set_alpha(0)
        for spine in axes.spines.values():
            spine.set_color(_INK)
    return figure


_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def page(title: str, tokenizer: str, sets: Sequence[Figures], rows: Sequence[ShownRow]) -> str:
    """The page as text. Whatever comes from the rows is escaped.

    Args:
        title: names what is shown.
        tokenizer: its name.
        sets: figures of the sets; may be empty.
        rows: the rows that are shown.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible, "name": visible_name, "hover": _hover}
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title,
        tokenizer=tokenizer,
        sets=sets,
        rows=rows,
        plot=svg(sets) if sets else "",
        lines_of=lines_of,
        inner_border=INNER_BORDER,
    )


def _hover(piece: Piece) -> str:
    if not piece.text:
        return f"id {piece.id}: continues a character"
    return f"id {piece.id}: {visible(piece.text)}"


_SMALL_BYTES = 1 << 20
"""Bytes of a set whose rows are tokenized here: a second or two."""


def known_samples(
    part: DataPart,
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sft: bool,
    fallback_cache: Path,
) -> int | None:
    """Samples of one pass over a training set, as the run counts them; None if that is not known.

    No file is written.

    Args:
        part: the set.
        data: the run's settings.
        model: vocabulary and sequence length.
        tokenizer: the run's, with its chat template.
        sft: .bin/.idx hold conversations, not documents to learn as a whole.
        fallback_cache: see `sft_options`.

    Raises:
        DataError: the set cannot be used; of rows that are not read this is not known.
    """
    if data.dataset_type == "raw":
        return _of_rows(part.path, data, tokenizer, fallback_cache)
    # These import megatron-core, which raw rows do not need.
    if sft:
        from patch.data.pretraining.indexed_sft import load_indexed_sft

        length, rows = model.seq_length, model.vocab_size
        return len(load_indexed_sft(part.path, tokenizer, sequence_length=length, vocab_size=rows))
    from patch.data.pretraining.run_sets import train_samples

    return train_samples(part, data, model, tokenizer)


def _of_rows(
    path: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, fallback_cache: Path
) -> int | None:
    options, length = sft_options(data, fallback_cache), data.max_padding_length
    source = find_sft(Path(path), tokenizer, length, options)
    if source is None:
        if sum(file.stat().st_size for file in files_of(path, "train_data_path")) > _SMALL_BYTES:
            return None
        source = load_sft(Path(path), tokenizer, length, replace(options, cache_dir=None))
    return len(pack(source.sizes, length)) if data.packing else len(source)


_FIELD = "train_data_path"
_FEW_LINES = 30
"""What `--dry-run` shows of a sample."""
_UNKNOWN = (
    "its samples are counted when it is tokenized, by the run or before it: llama-patch preview "
    "--config FILE (what --dry-run prints, in a file)"
)


@dataclass(frozen=True, slots=True)
class Preview:
    """Rows and figures of the training sets of a run."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    rows: list[ShownRow] = field(default_factory=list)
    sets: list[Figures] = field(default_factory=list)

    @property
    def parts(self) -> tuple[DataPart, ...]:
        """The sets.

        Raises:
            ConfigError: they cannot be read.
        """
        return parse_data(self.data.train_data_path, _FIELD)

    def show_rows(
        self, console: Console, count: int = 1, number: int | None = None, max_lines: int | None = None
    ) -> None:
        """Print rows, or documents of .bin/.idx, as tokens. No other is read, and no file is written.

        Args:
            console: where they are printed.
            count: print so many rows of each set.
            number: print the row that messages call line or row `number` of each file instead, or this
                document, from 1.
            max_lines: print at most so many lines of tokens for each sample; None: all.

        Raises:
            DataError: a row, a file or the chat template cannot be used, or no file has this row.
        """
        for row in self._chosen(count, number):
            if not self.rows:
                print_legend(console)
            print_row(console, row, max_lines)
            self.rows.append(row)

    def show_statistics(self, console: Console) -> None:
        """Print figures of the sets. Rows are tokenized as a run does it, into the token cache that it uses.

        Raises:
            DataError: a file or a row cannot be used, or no row has anything to learn.
        """
        length = self.data.max_padding_length
        for part in self.parts:
            figures = self._of_rows(part) if self._has_rows else self._indexed(part).statistics(length)
            print_statistics(console, figures)
            self.sets.append(figures)

    def check(self) -> None:
        """Refuse the sets that a run would refuse although they could be shown.

        Raises:
            DataError: too large a share of a set's rows is dropped.
        """
        for part, figures in zip(self.parts, self.sets, strict=False):
            if isinstance(figures, SetStatistics):
                figures.report.refuse_drops(part.path, self.data.max_dropped_share)

    def write(self, html: Path | None, json_file: Path | None) -> None:
        """Write what was shown as one HTML page, and as JSON.

        Args:
            html: the page's file; None: none.
            json_file: the file of JSON; None: none.

        Raises:
            ConfigError: a file cannot be written.
        """
        try:
            if html is not None:
                text = page(self.data.train_data_path, self.tokenizer.name_or_path, self.sets, self.rows)
                html.write_text(text, encoding="utf-8")
            if json_file is not None:
                json_file.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error

    def to_json(self) -> dict[str, Any]:
        """What was shown as plain values."""
        return {
            "data": self.data.train_data_path,
            "tokenizer": self.tokenizer.name_or_path,
            "sets": [each.to_json() for each in self.sets],
            "rows": [row.to_json() for row in self.rows],
        }

    @property
    def _has_rows(self) -> bool:
        """Whether the sets hold rows; else they are .bin/.idx."""
        return self.data.dataset_type == "raw"

    def _indexed(self, part: DataPart) -> IndexedPreview:
        from patch.data.preview.indexed import open_preview  # imports megatron-core, which rows do not need

        with about(_FIELD):
            return open_preview(part, self.tokenizer)

    def _of_rows(self, part: DataPart) -> SetStatistics:
        length = self.data.max_padding_length
        with TemporaryDirectory() as fallback:
            options = replace(sft_options(self.data, Path(fallback)), max_dropped_share=1.0)
            return SetStatistics.of(part, load_sft(Path(part.path), self.tokenizer, length, options), length)

    def _chosen(self, count: int, number: int | None) -> Iterator[ShownRow]:
        if not self._has_rows:
            numbers = range(1, count + 1) if number is None else [number]
            for part in self.parts:
                yield from self._indexed(part).rows(numbers)
            return
        ensure_chat_template(self.tokenizer, self.data.chat_template)
        # Rows are shown without the token cache, and a few of them need one process.
        options = replace(sft_options(self.data, Path()), cache_dir=None, num_workers=1)
        for part in self.parts:
            files = files_of(part.path, _FIELD)
            items = first_items(files, count) if number is None else numbered_items(files, number)
            yield from shown_rows(items, self.tokenizer, options, self.data.max_padding_length)


def show_data(
    data: DataConfig, model: ModelConfig, tokenizer: str | None, *, sft: bool, output: Path, stream: TextIO
) -> int | None:
    """Show the first row or document that a run reads, and the samples of its training sets. Writes no file.

    Args:
        data: the run's data.
        model: vocabulary and sequence length.
        tokenizer: folder or name of the tokenizer.
        sft: whether the run is a fine-tuning.
        output: the run's folder.
        stream: where it is printed.

    Returns:
        Samples of one pass over all training sets; None if that is not known before they are tokenized.

    Raises:
        DataError: the tokenizer, the row, or a set whose samples can be counted cannot be used.
    """
    loaded = load_tokenizer(tokenizer)
    check_vocabulary(loaded, model.vocab_size)
    parts = parse_data(data.train_data_path, _FIELD)
    preview = Preview(replace(data, train_data_path=format_data(parts[:1])), loaded)
    preview.show_rows(terminal(stream), max_lines=_FEW_LINES)
    known = []
    for part in parts:
        with about(_FIELD):
            samples = known_samples(
                part, data, model, loaded, sft=sft, fallback_cache=output / DATA_CACHE_FOLDER
            )
        stream.write(f"data        {part.path}: {_UNKNOWN if samples is None else _words(samples, data)}\n")
        known.append(samples)
    return None if None in known else sum(samples for samples in known if samples is not None)


def _words(samples: int, data: DataConfig) -> str:
    packs = " (packs)" if data.packing and data.dataset_type == "raw" else ""
    return f"{counted(samples, 'sample')}{packs} in one epoch"
