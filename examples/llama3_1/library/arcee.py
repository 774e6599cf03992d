"""Train, plan and export a model family that the project does not know: Arcee's AFM.

python examples/llama3_1/library/arcee.py --load ARCEE_FOLDER FLAGS...  # or the 25 positions
"""

import sys

from patch.families import Family, Traits, register_family
from toolkits.train.__main__ import main

ARCEE = Family(  # LLaMA's layers, but with an ungated MLP and squared ReLU
    model_type="arcee",
    architecture="ArceeForCausalLM",
    traits=Traits(activation="relu2", gated_linear_unit=False),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    type_keys=lambda model: {"attention_bias": False, "mlp_bias": False},
)

register_family(ARCEE)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], script=__file__))
