"""Plan a run for other machines: does it fit, how long is a step, which layouts are faster?

    python examples/llama3_1/library/plan_run.py MACHINE NODES FLAGS...
    python examples/llama3_1/library/plan_run.py h100 4 --model-size 70B --seq-length 8192 \\
        --global-batch-size 512 --tensor-model-parallel-size 8 --sequence-parallel

It takes seconds and no GPU. All figures are computed from data sheets; none is measured.
"""

import sys

from patch.errors import ConfigError
from patch.plan.fits import fit_of
from patch.plan.planned_run import plan_run
from patch.plan.search import search
from patch.plan.timing.step_time import step_time

machine, nodes, *flags = sys.argv[1:]
try:
    planned = plan_run(flags, machine, int(nodes))
except ConfigError as error:  # the message names the found and the expected value, and the flag
    sys.exit(f"ERROR {error}")
fit, time = fit_of(planned.resolved, planned.machine.facts), step_time(planned.resolved, planned.machine)
needed, usable = fit.device_needed / 2**30, fit.device_usable / 2**30
print(f"as given: {needed:.0f} GiB of {usable:.0f}, {time.seconds:.2f} s a step")
for found in search(planned.run, planned.machine, num_best=3):
    layout, needed, seconds = found.layout, found.fit.device_needed / 2**30, found.time.seconds
    print(f"TP {layout.tp} PP {layout.pp} CP {layout.cp}: {needed:.0f} GiB, {seconds:.2f} s a step")
