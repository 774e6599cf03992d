"""Arguments of attention in Transformer Engine's layers, without Transformer Engine; see test_te_spec.py."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from small_runs import small_run

importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # with the real extension, if any


class _Upstream(torch.nn.Module):
    """The arguments of megatron-core's TEDotProductAttention, which takes no others."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None,
        k_channels: int | None = None, v_channels: int | None = None, cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()


@pytest.fixture
def te_spec(monkeypatch: pytest.MonkeyPatch) -> Any:
    extension, package = (ModuleType(name) for name in ("extension", "package"))
    extension.TEDotProductAttention = _Upstream  # type: ignore[attr-defined]
    package.RMSNorm = torch.nn.Module  # type: ignore[attr-defined]
    for name in ("TENorm", "TERowParallelLinear"):
        setattr(extension, name, torch.nn.Module)
    for name in ("set_save_original_input", "te_checkpoint"):
        setattr(extension, name, None)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", extension)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    monkeypatch.delitem(sys.modules, "patch.model.te_spec", raising=False)
    yield importlib.import_module("patch.model.te_spec")
    sys.modules.pop("patch.model.te_spec", None)


def test_attention_takes_what_its_specification_gives(te_spec: Any) -> None:
    config = small_run(window_size=(7, 0))
    groups, backends = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)), SimpleNamespace(attention=())
    builder = te_spec.TELayerSpecBuilder(config, None, groups, backends, frozenset(), None, None)
    spec = builder._core_attention(1)
    attention = spec.module(
        config=config.model, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        **spec.params,
    )  # fmt: skip
    assert attention.of_packed_rows.window == 8 and attention.of_packed_rows.cap is None
