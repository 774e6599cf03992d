"""Stream the weights of a sharded live model as Hugging Face tensors, for vLLM in an RL program.

torchrun --nproc-per-node 2 examples/llama3_1/library/stream_weights.py HF_FOLDER
"""

import os
import sys

from patch import compat  # isort: skip  # before megatron-core, whose warnings about Apex it silences
import torch.distributed as dist
from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config import RunConfig
from patch.convert import import_hf, iter_hf_weights, model_of
from patch.device import DeviceContext
from patch.model import build_llama_model

context = DeviceContext.select(int(os.environ["LOCAL_RANK"]))  # a GPU and NCCL, or the CPU and gloo
if not context.is_cuda:
    compat.apply(cuda=False)  # without it megatron-core's layers need a GPU
dist.init_process_group(context.backend)
initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
groups, folder = ProcessGroupCollection.use_mpu_process_groups(), sys.argv[1]
model = model_of(folder)
stages = build_llama_model(RunConfig.of_model(model, precision="bf16"), groups, context.device)
import_hf(stages, folder, model, groups)
for name, tensor in iter_hf_weights(stages, model, groups, receivers="first"):
    print(name, tensor)  # rank 0 gets each full tensor in turn: load_weights([(name, tensor)])
dist.destroy_process_group()
