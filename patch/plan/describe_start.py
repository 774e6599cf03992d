"""What a run's log says of its layout and memory before the first step."""

from __future__ import annotations

from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.plan.activation_peak import heaviest_rank
from patch.plan.describe import layout_text
from patch.plan.memory import bytes_per_rank, offloaded_bytes
from patch.storage.sizes import counted, size_text

_SHARED = {
    ZeroStage.NONE: "nothing",
    ZeroStage.OPTIMIZER: "optimizer states",
    ZeroStage.GRADIENTS: "optimizer states and gradients",
}
_KINDS = {"optimizer": "optimizer states"}


def start_lines(config: RunConfig, *, cuda: bool) -> tuple[str, str]:
    """The layout and a step's micro-batches; the planned memory of the heaviest rank by kind.

    Args:
        config: the run, its automatic choices made.
        cuda: whether it runs on GPUs.
    """
    size = config.training.micro_batch_size
    return (
        f"layout: processes {layout_text(config)}; replicas share {_SHARED[config.zero_stage]}; a step has "
        f"{counted(config.num_micro_batches, 'micro-batch')} of {counted(size, 'sample')} a replica",
        _memory(config, cuda=cuda),
    )


def _memory(config: RunConfig, *, cuda: bool) -> str:
    if config.model.precision_align is not None:
        text = _sum(bytes_per_rank(config)._asdict())
        return f"planned state of a rank: {text}; --precision-align's activations are not planned"
    rank = heaviest_rank(config, cuda=cuda)
    kinds = bytes_per_rank(config, rank.pp_rank)._asdict()
    if is_auto := config.optimizer.optimizer_offload_policy == "auto":
        states = kinds.pop("optimizer")
    kinds |= {
        "gradients under way": rank.staging,
        "8-bit weights": rank.fp8_weights,
        "activations": rank.activations.total,
    }
    text = f"planned memory of the heaviest rank: {_sum(kinds)}"
    if is_auto:
        text += f"; {size_text(states)} of optimizer states beside it as far as there is room"
    on_host = offloaded_bytes(config, rank.pp_rank) + rank.activations.on_host
    return text + (f"; {size_text(on_host)} more in host memory" if on_host else "")


def _sum(kinds: dict[str, int]) -> str:
    parts = " + ".join(f"{_KINDS.get(kind, kind)} {size_text(size)}" for kind, size in kinds.items() if size)
    return f"{size_text(sum(kinds.values()))} = {parts}"
