"""examples/llama3_1/kubernetes.yaml: Kubernetes takes it, and its pods are the machines of one run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from patch.device import MachineFacts
from patch.preflight.cluster import Rendezvous
from patch.preflight.parse import parse_args

FILE = Path(__file__).parents[3] / "examples/llama3_1/kubernetes.yaml"
SERVICES = os.environ.get("SERVICES", "")


def test_pods_are_the_machines_of_one_run() -> None:
    service, job = yaml.safe_load_all(FILE.read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    number = {"name": "RANK", "value": "1"}  # of a pod, which only Kubernetes knows
    variables = {each["name"]: each["value"] for each in [*container["env"], number] if "value" in each}
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    invocation = parse_args(container["args"], variables, MachineFacts(cuda_devices=gpus, cpu_cores=2))
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert invocation.rendezvous == Rendezvous(1, first, service["spec"]["ports"][0]["port"])
    parallel = invocation.config.parallel
    assert parallel.nnodes == spec["completions"] == spec["parallelism"]
    assert parallel.nproc_per_node == gpus == int(variables["KUBERNETES_CONTAINER_RESOURCE_GPU"])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]


@pytest.mark.skipif(not SERVICES, reason="SERVICES names no folder with kubernetes-validate")
def test_schema_takes_it_and_not_a_misspelled_one(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(FILE.read_text().replace("completions:", "completion:"))
    for file, code in ((FILE, 0), (bad, 1)):
        checked = subprocess.run(
            [sys.executable, "-P", "-m", "kubernetes_validate", "--strict", str(file)],
            env={**os.environ, "PYTHONPATH": SERVICES}, check=False,
        )  # fmt: skip
        assert checked.returncode == code
