"""What is converted there and back loads in transformers 4 too, with the logits of transformers 5.

In config.json's spelling of transformers 4, in which nearly all published models are, and in that of 5.

TRANSFORMERS_4 names a folder with transformers 4.57, tokenizers and huggingface_hub, made by
`pip install --no-deps --target` (as .ci/run does); a process of its own takes them from there.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_families import FAMILIES, MIXTURES, family_model, spell_as_4

from patch.convert import hf_to_mcore, mcore_to_hf

_RELEASE = os.environ.get("TRANSFORMERS_4", "")
pytestmark = pytest.mark.skipif(not _RELEASE, reason="TRANSFORMERS_4 names no folder with transformers 4")

_NAMES = [
    name
    for name in {**FAMILIES, **MIXTURES}
    if name not in ("ministral-3", "deepseek-v2", "deepseek-v2-lite")
]
"""Families whose class transformers 4.57 has; its DeepSeek-V2 does not scale scores by YaRN's mscale."""
_SOURCES = [f"{name}-{spelling}" for name in _NAMES for spelling in (4, 5)]
_TOKENS = [[1, 5, 9, 200, 7] * 8]
_LOAD = """
import json, sys, torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
root, tokens, *names = sys.argv[1:]
found = {}
for name in names:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        f"{root}/{name}-back", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        torch.save(model(torch.tensor(json.loads(tokens)), use_cache=False).logits, f"{root}/{name}.pt")
    found[name] = {key: sorted(map(str, values)) for key, values in report.items() if values}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict]:
    """Where the folders lie, what transformers 4 reported of each, and the logits of transformers 5."""
    root, expected = tmp_path_factory.mktemp("exports"), {}
    for name in _NAMES:
        model = family_model(name, root / f"{name}-5", spelling=5)
        shutil.copytree(root / f"{name}-5", root / f"{name}-4")
        spell_as_4(root / f"{name}-4")
        hf_to_mcore(root / f"{name}-4", root / f"{name}-mcore")
        for source in (f"{name}-4", f"{name}-5"):
            mcore_to_hf(root / f"{name}-mcore", root / f"{source}-back", root / source)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected[name] = model(torch.tensor(_TOKENS), use_cache=False).logits
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(root), json.dumps(_TOKENS), *_SOURCES],
        env={**os.environ, "PYTHONPATH": _RELEASE}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1]), expected


@pytest.mark.parametrize("name", _SOURCES)
def test_exported_folder_loads_whole_and_computes_the_same(loaded: tuple, name: str) -> None:
    root, reports, expected = loaded
    assert reports[name] == {}
    family = name[: -len("-4")]
    bound = 0 if family in FAMILIES else 1e-5  # transformers 4 adds the outputs of experts in another order
    found = torch.load(root / f"{name}.pt", weights_only=True)
    torch.testing.assert_close(found, expected[family], rtol=0, atol=bound)
