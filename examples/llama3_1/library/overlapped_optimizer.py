"""Train any torch module with ZeRO-2: the ranks shard gradients and optimizer states.

torchrun --nproc-per-node 2 examples/llama3_1/library/overlapped_optimizer.py  # writes rank*.pt
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist

from patch.device import DeviceContext
from patch.optimizer import OptimizerConfig, ZeroStage, build_optimizer

context = DeviceContext.select(int(os.environ["LOCAL_RANK"]))  # a GPU and NCCL, or the CPU and gloo
dist.init_process_group(context.backend)
torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Bilinear(16, 16, 4).to(context.device)
optimizer = build_optimizer([model], OptimizerConfig(lr=1e-2), ZeroStage.GRADIENTS)
inputs = torch.randn(10, 2, 8, 16, generator=torch.manual_seed(1 + dist.get_rank())).to(context.device)
for micro_batches in inputs:
    optimizer.zero_grad(lr=1e-2)
    for index, batch in enumerate(micro_batches):
        with optimizer.no_sync() if index == 0 else nullcontext():  # for all micro-batches but the last
            loss = model(batch, batch).square().mean() / len(micro_batches) / dist.get_world_size()
            optimizer.scale_loss(loss).backward()  # gradients are summed over micro-batches and ranks
    print(f"gradient norm {optimizer.step().grad_norm:.4f}")
states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(states, f"rank{dist.get_rank()}.pt")  # to resume: load_state_dict of both on the same rank
dist.destroy_process_group()
