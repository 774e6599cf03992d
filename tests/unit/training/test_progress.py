"""The progress bar on a real pseudo-terminal, beside the project's log lines.

Run as a program this file is what draws: three steps with a log line after each, and one after the bar.
"""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from patch.compat import quick_start
from patch.logger import configure_logging, get_logger

STEPS = 3
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def draw() -> None:
    with quick_start():
        from patch.training.hooks.hook import ProgressDisplay

    configure_logging(rank=0)
    log = get_logger("patch.test")
    display = ProgressDisplay(0, STEPS)
    for iteration in range(1, STEPS + 1):
        display.on_log(
            {"iteration": iteration, "loss": 1.0, "tokens_per_s_per_gpu": 10.0, "grad_norm": 1.0, "lr": 0.1}
        )
        log.info("saved %d", iteration)
    display.on_evaluate({"iteration": STEPS, "valid_loss": 1.0, "valid_ppl": 2.718})
    display.on_evaluate({"iteration": STEPS, "valid_loss": 2.0, "valid_ppl": 7.389, "valid_loss/chat": 2.5})
    display.close()
    log.info("the bar is gone")


def output_on_a_terminal() -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    drawing = subprocess.Popen([sys.executable, __file__], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    received = b""
    try:
        while chunk := os.read(ours, 65536):
            received += chunk
    except OSError:  # a pseudo-terminal reports its closed end with an error
        pass
    os.close(ours)
    assert drawing.wait(30) == 0, received
    return received.decode()


def test_log_lines_stand_on_lines_of_their_own_above_the_bar() -> None:
    output = output_on_a_terminal()
    assert f"{STEPS}/{STEPS}" in output, "no bar was drawn"
    segments = [segment.strip() for segment in re.split(r"[\r\n]+", CONTROL.sub("", output))]
    expected = [f"INFO saved {iteration}" for iteration in range(1, STEPS + 1)] + ["INFO the bar is gone"]
    assert [segment for segment in segments if "INFO" in segment] == expected
    assert f"step {STEPS}  validation loss 1.0000  perplexity 2.718" in segments
    assert f"step {STEPS}  validation loss 2.0000  perplexity 7.389  (chat 2.5000)" in segments


if __name__ == "__main__":
    draw()
