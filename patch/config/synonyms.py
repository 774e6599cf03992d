"""Names that other programs have for our flags, so that a message can name the flag that is meant.

Source: the options of transformers' TrainingArguments, TRL, LLaMA-Factory, DeepSpeed, vLLM and torchrun.
"""

from __future__ import annotations

from patch.errors import nearest

_NAMES: dict[str, str] = {
    "--profile": "use-pytorch-profiler profile-step-start profile-step-end profile-ranks",
    "--lr": "learning-rate max-lr peak-lr",
    "--min-lr": "lr-min min-learning-rate",
    "--lr-warmup-iters": "warmup-steps warmup-iters num-warmup-steps",
    "--train-iters": "max-steps steps iters iterations num-steps train-steps",
    "--train-epochs": "epochs epoch num-epochs num-train-epochs",
    "--micro-batch-size": "batch-size per-device-train-batch-size micro-batch mbs",
    "--global-batch-size": "gradient-accumulation-steps grad-accum accumulation-steps gbs train-batch-size",
    "--seq-length": "seq-len max-seq-length max-seq-len max-model-len context-length model-max-length",
    "--max-padding-length": "max-length pad-len cutoff-len block-size",
    "--precision": "bf16 fp16 fp32 fp8 dtype torch-dtype mixed-precision",
    "--tensor-model-parallel-size": "tp tp-size tensor-parallel-size",
    "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel-size",
    "--context-parallel-size": "cp cp-size",
    "--cp-comm-type": "cp-type ulysses ring-attention",
    "--sequence-parallel": "sp",
    "--num-layers-per-virtual-pipeline-stage": "vp vpp",
    "--nproc-per-node": "nproc num-gpus num-processes gpus",
    "--recompute-granularity": "gradient-checkpointing activation-checkpointing ac",
    "--attention-backend": "attn-implementation use-flash-attn flash-attn flash-attention fl",
    "--optimizer-offload-policy": "offload cpu-offload optimizer-offload offload-optimizer",
    "--use-distributed-optimizer": "do zero zero-stage",
    "--clip-grad": "max-grad-norm grad-clip gradient-clipping",
    "--adam-eps": "adam-epsilon",
    "--train-data-path": "data data-path dataset dataset-path dataset-name train-file train-data train-path",
    "--valid-data-path": "eval-data eval-dataset validation-file valid-data val-data eval-file",
    "--load": "model model-name-or-path model-path checkpoint base-model pretrained-checkpoint",
    "--tokenizer-name-or-path": "tokenizer tokenizer-path tokenizer-name tokenizer-model",
    "--output-path": "output output-dir save-dir save-path",
    "--save-interval": "save-steps save-every",
    "--eval-interval": "eval-steps eval-every",
    "--chat-template": "template prompt-template conv-template",
    "--packing": "pack sample-packing sft-packing",
    "--data-workers": "preprocessing-num-workers num-proc num-workers dataset-num-proc",
    "--model-size": "size",
}
SYNONYMS: dict[str, str] = {f"--{name}": flag for flag, names in _NAMES.items() for name in names.split()}
"""Another program's flag -> ours."""


def nearest_flag(name: str, known: list[str]) -> str:
    """A hint ", did you mean --X?" for an unknown flag, or "" when none is close.

    Args:
        name: what was written, with its hyphens.
        known: the flags.
    """
    if (ours := SYNONYMS.get(name.replace("_", "-"))) in known:
        return f", did you mean {ours}?"
    # Without the hyphens, which all flags share: with them --tp is close to --sft.
    hint = nearest(name.lstrip("-"), [flag.removeprefix("--") for flag in known])
    return hint.replace("did you mean ", "did you mean --")
