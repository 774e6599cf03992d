"""Puts all packages of a wheel into one, llama_megatron_patch (its docstring says why). The rest is in
pyproject.toml. An installation with --editable finds `patch` and `toolkits` in the repository.
"""

import sys

from setuptools import find_packages, setup

NAME = "llama_megatron_patch"
NOT_INSIDE = ["toolkits.benchmarks*", f"toolkits.{NAME}"]
PACKAGES = find_packages(include=["patch*", "toolkits*"], exclude=NOT_INSIDE)
EXAMPLES = ["examples.llama3_1", "examples.llama3_1.library"]
OUTER = "" if "editable_wheel" in sys.argv else f"{NAME}."
FOLDERS = {OUTER + package: package.replace(".", "/") for package in (*PACKAGES, *EXAMPLES)}
FOLDERS[NAME] = f"toolkits/{NAME}"
DATA = ["*.txt", "*.yaml", "*.cpp", "*.sh", "py.typed"]

setup(packages=list(FOLDERS), package_dir=FOLDERS, package_data={package: DATA for package in FOLDERS})
