"""Every combination of the values of positions 9 to 17 either passes the rules, or is refused in clear words."""

from patch.config.choices import ZeroStage

SECTIONS = ("model", "parallel", "training", "data", "optimizer")
ACTIVATIONS = [
    {},
    {"recompute_granularity": "selective"},
    *(
        {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
        for method in ("uniform", "block")
        for number in (1, 2, 3)
    ),
]
OFFLOADED = [{}, {"cpu_offloading": True}, {"cpu_offloading": True, "cpu_offloading_num_layers": 2}]
STAGES = [
    {},
    *({"num_layers_per_virtual_pipeline_stage": number} for number in (1, 2, 3)),
    *({"pipeline_model_parallel_layout": text} for text in ("EttttL", "Ettt|tL", "E|tt|tt|L")),
    {"account_for_embedding_in_pipeline_split": True},
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
]
SHARDING = [
    {},
    {"overlapped_distributed_optimizer": True},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlapped_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "data_parallel_sharding": ZeroStage.NONE},
    {"data_parallel_sharding": ZeroStage.GRADIENTS},
]
