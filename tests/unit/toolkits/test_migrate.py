"""The commands of `llama-patch migrate`: parsed as train parses them, field by field."""

import json
import shlex
from pathlib import Path

import pytest

from patch.config.choices import ZeroStage
from patch.config.fields import value_of
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.preflight.parse import parse_args
from toolkits.migrate import main

FOREIGN = Path(__file__).with_name("foreign")
RUNS = {
    "run.yaml": (["--gpus", "2"], {
        "lora_rank": 16, "lora_alpha": 32.0, "lora_target_modules": "q_proj,v_proj", "sft": True,
        "dataset_type": "raw", "packing": True,
        "seq_length": 1024, "max_padding_length": 1024, "micro_batch_size": 2, "global_batch_size": 16,
        "lr": 1e-4, "train_iters": 305, "lr_warmup_iters": 31, "precision": "bf16", "weight_decay": 0.0,
        "adam_beta2": 0.999, "data_parallel_sharding": ZeroStage.PARAMETERS, "quantize_base": "nf4-double",
        "output_path": "FOLDER/saves/a b", "optimizer_offload_policy": "static", "clip_grad": 1.0,
        "lr_decay_style": "linear",
    }, ["val_size: use --valid-data-path", "colour: nothing here", "template",
        "dataset: use --train-data-path"]),
    "run.yml": (["--gpus", "4"], {
        "train_data_path": "FOLDER/rows.json FOLDER/more.json", "columns": "instruction=ask", "packing": True,
        "seq_length": 2048, "micro_batch_size": 2, "global_batch_size": 24, "train_epochs": 2.0, "lr": 2e-4,
        "min_lr": 2e-5, "exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit", "long_samples": "drop",
        "data_parallel_sharding": ZeroStage.PARAMETERS, "cpu_offloading_weights": True, "export_hf": True,
        "optimizer_offload_policy": "static", "lora_rank": None, "nproc_per_node": 4, "precision": "bf16",
    }, ["val_set_size"]),
    "ds.json": ([], {
        "global_batch_size": 64, "micro_batch_size": 2, "nproc_per_node": 8, "precision": "fp16", "lr": 2e-5,
        "initial_loss_scale": 4096.0, "clip_grad": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.99,
        "lr_decay_style": "constant",
        "adam_eps": 1e-6, "weight_decay": 0.0, "data_parallel_sharding": ZeroStage.GRADIENTS,
        "optimizer_offload_policy": "static", "offload_folder": "/disk", "lr_warmup_iters": 10,
        "reduce_bucket_size": 200_000_000, "optimizer_offload_chunk_size": None,
    }, []),
    "run.sh": (["the ckpt"], {
        "num_layers": 4, "seq_length": 4096, "max_position_embeddings": 4096, "precision": "bf16", "lr": 3e-4,
        "nproc_per_node": 8, "train_iters": 100, "lr_warmup_iters": 5, "load": None,
        "train_data_path": "0.7 FOLDER/A 0.3 FOLDER/B", "output_path": "FOLDER/the ckpt", "seed": 1234,
        "clip_grad": 0.5, "weight_decay": 0.01, "split": "969,30,1", "rotary_base": 1e4,
    }, ["--seed: $SEED needs a shell", "--decoupled-lr: ${...} needs", "${FP8?}, ${EXTRA?}: needs a shell"]),
    "pai.sh": ([], {
        "dataset_type": "raw", "model_size": "8B", "tensor_model_parallel_size": 4, "lr": 1e-5, "sft": True,
        "train_iters": 100, "output_path": "/out", "lora_rank": 8, "load": None, "alpaca_input_join": "empty",
    }, []),
}  # fmt: skip
STAND_INS = "--model-size 8B --seq-length 8 --train-iters 99 --train-data-path D --output-path O".split()


@pytest.mark.parametrize("name", RUNS)
def test_command_is_the_run_of_the_other_program(name, command, monkeypatch, capsys):
    """The files are in foreign/; MODEL is a Hugging Face folder."""
    monkeypatch.chdir(command.folder)
    model = command.hf_folder(max_position_embeddings=4096)
    Path(name).write_text((FOREIGN / f"{name}.txt").read_text().replace(": MODEL", f": {model}"))
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    Path("ds_z3.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    options, expected, lost = RUNS[name]
    assert main([name, *options]) == 0
    printed = capsys.readouterr().out
    assigned, _, words = printed.replace("\\\n", "").partition("llama-patch train")
    argv = shlex.split(words, comments=True)
    if name == "pai.sh":
        argv[21] = "none"  # a folder of another machine
    if "to add: " in printed:
        argv = [*STAND_INS[2 * ("--load" in argv) :], *argv]  # the last of repeated flags counts
    config = parse_args(argv, dict(each.split("=") for each in assigned.split()), MachineFacts(8, 64)).config
    assert {field: value_of(config, field) for field in expected} == {
        field: value.replace("FOLDER", str(command.folder)) if isinstance(value, str) else value
        for field, value in expected.items()
    }
    assert all(f"# not taken over: {key}" in printed for key in lost)
    assert printed.count("# not taken over") == len(lost), printed


@pytest.mark.parametrize(("micro", "accumulation", "world", "tp"), [(2, 4, 8, 1), (1, 3, 4, 2), (4, 1, 1, 1)])
def test_deepspeed_config_of_a_run_has_deepspeeds_batch(micro, accumulation, world, tp, command):
    """DeepSpeed asserts train_batch_size = micro-batch x accumulation x world; its world has no TP."""
    config = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    file = command.folder / "ds.json"
    file.write_text(json.dumps(config | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}))
    flags = f"--nproc-per-node {world} --tensor-model-parallel-size {tp} --lr 1 --deepspeed-config {file}"
    argv = [*STAND_INS, *flags.split()]
    run = parse_args(argv, {}, MachineFacts(8, 8)).config
    assert run.training.global_batch_size == micro * accumulation * (world // tp)
    assert (run.training.micro_batch_size, run.sharding) == (micro, ZeroStage.OPTIMIZER)
    argv += ["--global-batch-size", "24", "--precision", "fp32"]
    again = parse_args(argv, {}, command.machine).config.training
    assert (again.global_batch_size, again.precision) == (24, "fp32")
    file.write_text(json.dumps(config | {"scheduler": {"type": "OneCycle"}, "colour": 1}))
    with pytest.raises(ConfigError, match="(?s)no equivalent.*scheduler.type: .*colour: nothing here"):
        parse_args(argv, {}, command.machine)


LISTS = ", ".join(f"&l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9))  # 10**8 values
REFUSED = {
    "none.yaml": (None, "No such file"),
    "folder.yaml": ("", "folder"),
    "large.yaml": ("a: " + "x" * 2**20, "expected at most 1048576"),
    "tag.yaml": ("stage: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "bomb.yaml": (f"stage: [&l0 [x], {LISTS}]", "got more than 10000 values"),
    "loop.yaml": ("stage: &a [*a]", "nested too deeply"),
    "list.yaml": ("[1, 2]", "expected keys of Axolotl"),
    "other.json": ('{"model": 1}', "expected keys of Axolotl"),
    "broken.json": ('{"stage": ', "Expecting value"),
    "rule.json": ('{"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}', "--global-batch-size"),
    "empty.sh": ("echo pretrain_gpt.py", "got 0 training commands"),
    "two.sh": ("python pretrain_gpt.py --lr 1\npython pretrain_gpt.py --lr 2", "got 2 training commands"),
    "nested.sh": ("$(echo $(which torchrun) pretrain_gpt.py --lr 1)", "got 0 training commands"),
    "quote.sh": ("python pretrain_gpt.py --lr '1", "a quotation mark is not closed"),
    "wrong.sh": ("python pretrain_gpt.py --num-layers 2 --lr 1 --hidden-size 65", "ERROR missing: "),
    "unset.sh": ("sh run.sh dsw 8B $3 " + "1 " * 22, "BATCH_SIZE: got $3, expected a value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name, tmp_path, capsys):
    text, message = REFUSED[name]
    file = tmp_path / name
    if name.startswith("folder"):
        file.mkdir()
    elif text is not None:
        file.write_text(text)
    assert main([str(file)]) == 2
    assert message in capsys.readouterr().err


def test_scripts_are_not_run(tmp_path, capsys):
    script, made = tmp_path / "run.sh", tmp_path / "made"
    script.write_text(f"touch {made}\nX=$(touch {made})\npython train.py --lr $X --seed `touch {made}`")
    main([str(script)])
    assert not made.exists() and "--lr, --seed: ${...} needs a shell" in capsys.readouterr().out
