"""Compare a checkpoint with its Hugging Face folder, and report the result as JSON, table and plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from patch.alignment.measure import SINGLE_FORM, Measurement, measure
from patch.alignment.verdict import Verdict, judge
from patch.device import FloatType
from patch.families import HfAttention
from patch.storage.places import StrPath, local_path


class Report(NamedTuple):
    """The measured differences, and whether they are normal."""

    measurement: Measurement
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values; its keys are a contract of `llama-patch align`."""
        measured, verdict = self
        first, routes = measured.logits.first, measured.logits.routes
        return {
            "hf": measured.hf,
            "mcore": measured.mcore,
            "device": measured.device,
            "params_dtype": measured.precision,
            "attention": measured.attention,
            "prompt_lengths": measured.prompt_lengths,
            "weights_equal": not measured.weights.differences,
            "weight_differences": [difference._asdict() for difference in measured.weights.differences],
            "config_differences": [difference._asdict() for difference in measured.config_differences],
            "logits": measured.logits.fast._asdict(),
            "logits_aligned": measured.logits.aligned._asdict(),
            "first_difference": first._asdict() if first else None,
            "sources": measured.logits.sources,
            "parts": measured.parts,
            **({"adapter": measured.adapter} if measured.adapter else {}),
            **({"routes": routes._asdict()} if routes else {}),
            "normal": verdict.is_normal,
            "verdict": verdict.text,
        }

    def table(self) -> list[str]:
        """Return lines for the terminal: the difference that each fast form adds, and statistics of both
        forms.
        """
        measured, logits = self.measurement, self.measurement.logits
        setting = f"{measured.precision} on {measured.device}, attention {measured.attention}"
        setting += f", adapter {measured.adapter}" if measured.adapter else ""
        parts = (f"{name} {value}" for name, value in measured.parts.items())
        lines = [f"  unlike LLaMA: {part}" for part in parts]
        lines.append(f"max |logit difference|, {setting}")
        for name, added in logits.sources.items():
            note = "fast and aligned are the same operations" if name in SINGLE_FORM else ""
            lines.append(f"  {name + ' fast':<18}{added:>12.3g}  {note}".rstrip())
        for name, stats in (("all fast", logits.fast), ("all aligned", logits.aligned)):
            lines.append(
                f"  {name:<18}{stats.max:>12.3g}  mean {stats.mean:.3g}, KL {stats.kl:.3g}, "
                f"cosine {stats.cosine:.6f}, top-1 equal in {stats.top1:.1%}"
            )
        return lines

    def write(self, file: StrPath) -> None:
        """Write the report as JSON, and a plot beside it (.png)."""
        file = local_path(file)
        file.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        _plot(self.measurement, file.with_suffix(".png"))


def verify(
    hf: StrPath, mcore: StrPath, *, precision: FloatType | None = None, attention: HfAttention = "sdpa",
    adapter: StrPath | None = None,
) -> Report:  # fmt: skip
    """Compare a checkpoint with the Hugging Face folder that should hold the same weights.

    Both models are loaded into this process, which initializes torch.distributed for one rank and shuts it
    down. On a machine without a GPU first call `patch.compat.apply(cuda=False)`: megatron-core needs it.

    Args:
        mcore: a converted checkpoint, a run's folder, its checkpoint/, or one checkpoint inside it.
        precision: dtype in which both models compute, or None for the checkpoint's dtype.
        adapter: a PEFT folder or a run's folder with adapters, which are given to both models.
    Raises:
        ConfigError: a folder is not of the expected kind, or `compat.apply` was not called on a CPU.
        CheckpointError: the checkpoint is damaged, or of another model.
        ConversionError: the Hugging Face folder is damaged, or of another model.
    """
    beside = local_path(adapter) if adapter else None
    measurement = measure(local_path(hf), local_path(mcore), precision, attention, beside)
    return Report(measurement, judge(measurement))


def _plot(measured: Measurement, file: Path) -> None:
    """Draw a bar for each source and for both forms, on a logarithmic scale; zeros have no bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    logits = measured.logits
    values = {**logits.sources, "all fast": logits.fast.max, "all aligned": logits.aligned.max}
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    least = min((value for value in values.values() if value > 0), default=1e-7) / 10
    bars = axes.barh(list(values), [max(value, least) for value in values.values()], left=0)
    axes.bar_label(bars, [f"{value:.2g}" for value in values.values()], padding=3)
    axes.set(xscale="log", xlim=(least, max(values.values()) * 10 or 1), xlabel="max |logit difference|")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.invert_yaxis()
    axes.set_title(f"What each fast form adds: {measured.precision}, {measured.device}, {measured.attention}")
    canvas.print_png(str(file))
