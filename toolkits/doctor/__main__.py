"""Check this machine: hardware, software, speed, and a small sharded run.

    llama-patch doctor [--json FILE] [--nproc N]

It takes one or two minutes and needs no GPU. Exit code 0: a run works, perhaps with warnings; 1: something is
broken, so that a run would fail. The JSON report contains no names of users or machines and no addresses.
Attach it to an issue, or give it to `llama-patch plan --machine FILE`.
"""

from __future__ import annotations

import argparse
import sys

from patch.device import MachineFacts
from patch.storage.atomic import write_atomically
from toolkits._arguments import ArgumentParser, members, output_file, typed
from toolkits.doctor.check import Finding, Settings, json_of, lines_of, run_check, verdict_of


def main(argv: list[str]) -> int:
    """Run all checks; return 0, or 1 if something is broken."""
    options = _parse(argv)
    # They import torch; --help and argument errors must not wait for it.
    from toolkits.doctor import devices, messages, self_test, software, speed

    checks = {
        "host": devices.check_host, "GPUs": devices.check_gpus, "software": software.check_software,
        "speed of the host": speed.measure_host, "speed of the GPUs": speed.measure_gpus,
        "messages between processes": messages.measure_messages, "training": self_test.run_self_test,
    }  # fmt: skip
    settings, report = Settings(options.machine, options.nproc), dict[str, list[Finding]]()
    for title, check in checks.items():
        report[title] = run_check(title, check, settings)
        if report[title]:
            print("\n".join(lines_of(title, report[title])), flush=True)
    print(f"verdict: {verdict_of(report)}")
    if options.json:
        write_atomically(options.json, json_of(report, speed.machine_part(report, settings)))
        print(f"report: {options.json}")
    return int(verdict_of(report) == "broken")


def _parse(argv: list[str]) -> argparse.Namespace:
    gone = {"--folder": "the file system is not checked; measure it with fio"}
    parser = ArgumentParser(prog=typed("python -m toolkits.doctor"), description=__doc__, gone=gone)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report here, too")
    parser.add_argument(
        "--nproc", type=members, metavar="N",
        help="processes between which messages are measured; default: the GPUs of this machine, or 2",
    )  # fmt: skip
    options = parser.parse_args(argv)
    machine = options.machine = MachineFacts.probe()
    options.nproc = options.nproc or machine.cuda_devices or 2
    if machine.cuda_devices and options.nproc > machine.cuda_devices:
        parser.error(f"--nproc {options.nproc}: expected at most {machine.cuda_devices}, a GPU each")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
