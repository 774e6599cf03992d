"""The example of the optimizer's README runs as it stands, and trains as torch's AdamW does."""

import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed

from patch import optimizer as optimizer_package
from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.optimizer import build_optimizer

EXAMPLE_LINES = 10
# Two orders of rounding in Adam; weights near 0.3 that moved by 5e-3.
BOUND = 1e-7


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(5, 4, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()


def example() -> str:
    readme = Path(optimizer_package.__file__).with_name("README.md").read_text()
    begin = readme.index("    optimizer = build_optimizer(")
    return textwrap.dedent(readme[begin : readme.index("\n\n", begin)])


def run_example(rank: int, world_size: int) -> list[float]:
    """How far the example's weights are from AdamW's, element by element."""
    batches = torch.randn(5, world_size, 6, 5, generator=torch.Generator().manual_seed(1))
    model, plain = Model(), Model()
    names = {"build_optimizer": build_optimizer, "OptimizerConfig": OptimizerConfig, "ZeroStage": ZeroStage}
    exec(example(), names | {"model": model, "batches": batches[:, rank], "dist": dist})
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in batches:
        adamw.zero_grad()
        (sum(plain(batch) for batch in step) / world_size).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
    return (model.layer.weight - plain.layer.weight).abs().flatten().tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_readmes_example_trains_as_torchs_adamw(world_size: int) -> None:
    assert len(example().splitlines()) <= EXAMPLE_LINES
    for found in run_distributed(run_example, world_size):
        assert max(found) < BOUND
