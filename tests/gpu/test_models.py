"""The optimizer around plain torch models on a GPU, against torch's own AdamW."""

import copy
from typing import Any

import pytest
import torch

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.device import DeviceContext
from patch.optimizer import build_optimizer

LR, STEPS = 1e-2, 6
BOUND = 2e-5
"""On weights near 0.3 after six steps of at most 0.01: two orders of the same sums in fp32."""
OFFLOAD: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 1.0},
}


class Network(torch.nn.Module):
    """A convolution, an LSTM that reads its flat list of weights, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(4, 8, 3)
        self.lstm = torch.nn.LSTM(8, 16, batch_first=True)
        self.norm = torch.nn.LayerNorm(16)
        self.tied = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.convolution(x).transpose(1, 2))
        return self.tied(torch.tanh(self.tied(self.norm(hidden)))).square().mean()


def batches(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, 20, generator=generator).to(device) for _ in range(STEPS)]


def weights_by_torch(model: torch.nn.Module, device: torch.device) -> list[torch.Tensor]:
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for batch in batches(device):
        optimizer.zero_grad()
        model(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return list(model.parameters())


def compare(device: torch.device, stage: ZeroStage, offload: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Network().to(device)
    expected = weights_by_torch(copy.deepcopy(model), device)
    config = OptimizerConfig(lr=LR, clip_grad=1.0, reduce_bucket_size=1000, **offload)
    optimizer = build_optimizer([model], config, stage)
    for batch in batches(device):
        optimizer.zero_grad(lr=LR)
        optimizer.scale_loss(model(batch)).backward()
        optimizer.step()
    optimizer.finish_param_sync()
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)


@pytest.mark.parametrize("stage", list(ZeroStage))
@pytest.mark.parametrize("place", OFFLOAD)
def test_weights_are_those_of_torch_adamw(job: DeviceContext, place: str, stage: ZeroStage) -> None:
    compare(job.device, stage, OFFLOAD[place])
