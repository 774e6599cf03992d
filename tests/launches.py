"""A tiny run for tests of the launcher, and the machine that it is for."""

from patch.config import RunConfig, schema
from patch.device import MachineFacts

MACHINE = MachineFacts(cuda_devices=0, cpu_cores=4)


def make_config(num_local: int, num_nodes: int = 1, **training: object) -> RunConfig:
    return RunConfig(
        model=schema.ModelConfig(
            num_layers=2,
            hidden_size=8,
            ffn_hidden_size=8,
            num_attention_heads=2,
            num_query_groups=2,
            kv_channels=4,
            vocab_size=16,
            seq_length=8,
            max_position_embeddings=8,
            rotary_base=1e4,
        ),
        parallel=schema.ParallelConfig(nproc_per_node=num_local, nnodes=num_nodes),
        training=schema.TrainingConfig(
            micro_batch_size=1, global_batch_size=num_local, train_iters=1, **training
        ),
        optimizer=schema.OptimizerConfig(lr=1e-3),
        data=schema.DataConfig(train_data_path="none", max_padding_length=8),
        checkpoint=schema.CheckpointConfig(output_path="none"),
    )
