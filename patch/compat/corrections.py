"""Corrections of megatron-core 0.16.1 to 0.19.2 for every device; entries are independent.

An entry names the releases that need it, and is applied only there. Lines are those of 0.16.1.

Tensor parallelism, before 0.19: tensor_parallel/mappings.py:20-33 (`_reduce`) all-reduces
`input_.contiguous()` but returns `input_`. If the tensor is not contiguous, the copy is reduced and the
unreduced original is returned. An example is the gradient of a transposed view at a micro-batch size above 1.
Delete `_reduce` with the support of 0.18.

Recomputation: tensor_parallel/random.py:635-636 treats `fp8=False` as fp8 (`fp8 is not None`), and fp8 uses
names that only Transformer Engine defines (588-596). Without Transformer Engine recomputed norms raise a
NameError. With it they need a GPU, and so fail on a machine without one. TransformerLayer creates such an
object for each recomputed norm (transformer_layer.py:577, 672). Delete `_init` when upstream reads the value.

That recomputation saves detached copies of the inputs that require gradients (random.py:599). Autograd keeps
such a leaf together with its gradient accumulator, which refers to the leaf. So saved-tensor hooks can
offload the content, but its memory stays (AC=offload). Here the inputs themselves are saved; the
recomputation detaches them anyway (708-713). Delete `_forward` when megatron-core saves the inputs.

Evaluation of interleaved stages: pipeline_parallel/schedules.py:1499-1518. With
`overlap_p2p_comm_warmup_flush` each send is waited for after the next send, and the last send of a rank
never. In training, gradients arrive only after that send. An evaluation just returns, and gloo cancels a
message whose handle is gone: the receiver waits forever. Delete `last_sends_arrive` when upstream waits for
the last send at the end of the schedule.

Layers of a stage: transformer/pipeline_parallel_layer_layout.py:152-195. The methods take the pipeline rank,
but the callers (transformer_block.py:90-93, transformer_layer.py:50-53) do not pass it. For interleaved
stages they count the first stage, unless parallel_state knows the stage's number: every stage of a rank would
have the layers of its first stage. Delete `StageLayout` when upstream's callers pass `pp_rank`, and the
methods do not need parallel_state.

Experts without Transformer Engine, before 0.17: transformer/moe/moe_utils.py:25-38 imports its functions in a
`try` whose `except` leaves their names undefined, and the router's product reads one of them (1192, 1225).
Delete the line in `define_missing_te_names` with the support of 0.16.

Latent attention without Transformer Engine: before 0.17 transformer/multi_latent_attention.py:57-66 takes a
stand-in of its extension module for Transformer Engine. It then checks a layer against a name that is no
class (185). Since 0.17 the module's name for a whole linear layer is None there (0.19.2: 61-75), so this
layer is refused as unknown (528). Delete the first line in `define_missing_te_names` with the support of
0.16, the last line when upstream always imports the layer.

Recomputation of norms and activations, since 0.17: tensor_parallel/random.py (0.19.2: 44-79) compiles a C++
extension in the first backward, for which every machine of a run needs a compiler and ninja. Here the output
gets a copy of the recomputed values, as in 0.16. Delete `_refill` when upstream's wheel has it.

Warnings: since 0.19 every TransformerConfig without CUDA graphs warns (transformer_config.py:2415) about a
setting that it made itself. dist_checkpointing/strategies/torch.py:138 uses torch's deprecated ShardedTensor,
which would warn at every save; tensor_parallel/mappings.py uses collectives that torch 2.13 renamed. A user
cannot change that. Delete a row of `_WARNINGS` when no supported release has the warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from patch.compat.release import RELEASE

_WARNINGS = {
    "Please use DTensor instead": FutureWarning,
    r"`torch\.distributed\.\w+_tensor` is deprecated": FutureWarning,
    "full scope is deprecated": UserWarning,
}
"""The beginnings of the warnings, and their classes."""
_upstream_init = random.CheckpointWithoutOutput.__init__
_upstream_forward = random.CheckpointWithoutOutputFunction.forward


def apply() -> None:
    """Apply all corrections of this module in this process."""
    define_missing_te_names()
    if RELEASE >= (0, 17):
        random._get_share_storage = lambda: _refill
    if RELEASE < (0, 19):
        mappings._reduce = _reduce
    random.CheckpointWithoutOutputFunction.forward = staticmethod(_forward)
    random.CheckpointWithoutOutput.__init__ = _init
    for message, kind in _WARNINGS.items():
        warnings.filterwarnings("ignore", message, kind)


def define_missing_te_names() -> None:
    """Define names that megatron-core leaves undefined or sets wrongly without Transformer Engine.

    Results do not change.
    """
    if RELEASE < (0, 17):
        multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
        vars(moe_utils).setdefault("te_general_gemm", None)
    else:
        multi_latent_attention.Linear = multi_latent_attention.Linear or Linear


def _reduce(input_: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return input_
    reduced = input_.contiguous()
    torch.distributed.all_reduce(reduced, group=group)
    return reduced


@torch.no_grad()
def _refill(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give an output whose memory was freed a copy of the recomputed values."""
    memory = recomputed.untyped_storage()
    output.untyped_storage().resize_(memory.size())
    output.untyped_storage().copy_(memory)


def _init(self: random.CheckpointWithoutOutput, fp8: str | bool | None = False) -> None:
    _upstream_init(self, fp8)
    self.fp8 = bool(fp8)


def _forward(
    ctx: Any, function: Callable[..., Any], recomputation: random.CheckpointWithoutOutput, *inputs: Any
) -> Any:
    outputs = _upstream_forward(ctx, function, recomputation, *inputs)
    ctx.save_for_backward(*inputs)
    return outputs


@contextmanager
def last_sends_arrive() -> Iterator[None]:
    """On exit, wait for the last message that was sent to each neighbour in this context."""
    send_and_receive = p2p_communication._p2p_ops
    last: dict[str, Any] = {}

    def noted(**arguments: Any) -> dict[str, Any]:
        requests = send_and_receive(**arguments)
        last.update({name: request for name, request in requests.items() if name.startswith("send")})
        return requests

    p2p_communication._p2p_ops = noted
    try:
        yield
    finally:
        p2p_communication._p2p_ops = send_and_receive
    for request in last.values():
        if not request.is_completed():  # gloo can wait for a message only once
            request.wait()


class StageLayout(PipelineParallelLayerLayout):
    """The layers of all pipeline stages, and the layers of this rank's stages.

    Args:
        stage_layers: layers of each stage, in the order of the forward pass.
        pp_size: number of pipeline ranks.
        pp_rank: this pipeline rank.
    """

    def __init__(self, stage_layers: list[int], pp_size: int, pp_rank: int) -> None:
        layout = [[LayerType.decoder] * layers for layers in stage_layers]
        layout[0].insert(0, LayerType.embedding)
        layout[-1].append(LayerType.loss)
        super().__init__(layout, pp_size)
        self._stage_layers, self._pp_rank = stage_layers, pp_rank

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers of a stage; only decoder layers are counted."""
        return self._stage_layers[self._stage(layer_type, vp_stage, pp_rank)]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers before a stage."""
        return sum(self._stage_layers[: self._stage(layer_type, vp_stage, pp_rank)])

    def _stage(self, layer_type: LayerType, vp_stage: int | None, pp_rank: int | None) -> int:
        assert layer_type is LayerType.decoder, "a layer that this project builds"
        rank = self._pp_rank if pp_rank is None else pp_rank
        return (vp_stage or 0) * self.pipeline_model_parallel_size + rank
