"""Upstream's layout of pipeline stages for a rank that is passed on, not read from parallel_state.

megatron-core 0.16.1, transformer/pipeline_parallel_layer_layout.py:152-195: the methods take the pipeline
rank, but the callers (transformer_block.py:90-93, transformer_layer.py:50-53) do not pass it on. Of
interleaved stages they always count the first one, unless parallel_state knows their number: every stage of a
rank would have the layers of its first one.

To delete when upstream's callers pass `pp_rank`, and the methods need nothing of parallel_state.
"""

from __future__ import annotations

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


class StageLayout(PipelineParallelLayerLayout):
    """The layers of all pipeline stages, and which of them a stage of this rank has.

    Args:
        stage_layers: layers of each stage in the order in which a batch passes them.
        pp_size: pipeline ranks.
        pp_rank: this one.
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
        """Layers of a stage; other types of layers have no number here."""
        return self._stage_layers[self._stage(layer_type, vp_stage, pp_rank)]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Layers before a stage."""
        return sum(self._stage_layers[: self._stage(layer_type, vp_stage, pp_rank)])

    def _stage(self, layer_type: LayerType, vp_stage: int | None, pp_rank: int | None) -> int:
        assert layer_type is LayerType.decoder, "a layer that this project builds"
        rank = self._pp_rank if pp_rank is None else pp_rank
        return (vp_stage or 0) * self.pipeline_model_parallel_size + rank
