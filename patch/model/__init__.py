"""The LLaMA model on megatron-core's GPTModel; see README.md."""

from patch.model.init import initialize_weights
from patch.model.llama import DTYPES, LlamaModel, build_llama_model, sharded_weights

__all__ = ["DTYPES", "LlamaModel", "build_llama_model", "initialize_weights", "sharded_weights"]
