"""Checks this machine: what it is, what it lacks, how fast it is, and whether a small sharded run works.

    llama-patch doctor [--json FILE] [--nproc N] [--folder DIR]

It takes one minute on an idle machine, four on a busy one, and needs no GPU. Exit code: 0, also with
warnings; 1 if something is broken, so that a run would fail. The JSON report has no names of people or
machines and no addresses: attach it to an issue, or give it to `llama-patch plan --machine FILE`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from patch.device import MachineFacts
from patch.storage.atomic import write_atomically
from toolkits._arguments import ArgumentParser, members, output_file, typed
from toolkits.doctor.check import (
    Check,
    Finding,
    Settings,
    json_of,
    lines_of,
    run_check,
    verdict_lines,
    verdict_of,
)


def _checks() -> tuple[Check, ...]:
    # They import torch, for which --help and a wrong argument need not wait.
    from toolkits.doctor import folder, gpus, host, messages, self_test, software, speed

    return (
        Check("processor", host.check_processor),
        Check("memory", host.check_memory),
        Check("limits", host.check_limits),
        Check("ranks", host.check_ranks),
        Check("GPUs", gpus.check_gpus, 180),
        Check("versions", software.check_versions, 60),
        Check("imports", software.check_imports, 240),
        Check("compilers", software.check_compilers, 120),
        Check("kernels", software.check_accelerations),
        Check("variables", host.check_variables),
        Check("network", host.check_network),
        Check("speed of the host", speed.measure_host, 60),
        Check("speed of the GPUs", speed.measure_gpus, 120),
        Check("messages between processes", messages.measure_messages, 90),
        Check("file system", folder.check_folder, 120),
        Check("self-test", self_test.run_self_test, 600),
    )


def main(argv: list[str]) -> int:
    """Run all checks; 0, or 1 if something is broken."""
    options = _parse(argv)
    settings = Settings(options.machine, options.nproc, options.folder)
    report: dict[str, list[Finding]] = {}
    for check in _checks():
        report[check.title] = run_check(check, settings)
        if report[check.title]:
            print("\n".join(lines_of(check.title, report[check.title])), flush=True)
    print("\n" + "\n".join(verdict_lines(report)))
    if options.json:
        from toolkits.doctor.speed import machine_part

        write_atomically(options.json, json_of(report, machine_part(report, settings), options.folder))
        print(f"report: {options.json}")
    return int(verdict_of(report) == "broken")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.doctor"), description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report here, too")
    parser.add_argument(
        "--nproc", type=members, metavar="N",
        help="processes between which messages are measured; default: the GPUs of this machine, or 2",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR",
        help="where checkpoints would be written; 256 MiB are written there and removed; default: here",
    )  # fmt: skip
    options = parser.parse_args(argv)
    machine = options.machine = MachineFacts.probe()
    options.nproc = options.nproc or machine.cuda_devices or 2
    if machine.cuda_devices and options.nproc > machine.cuda_devices:
        parser.error(f"--nproc {options.nproc}: expected at most {machine.cuda_devices}, a GPU each")
    if not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: no such folder")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
