"""AC=auto: what it refuses, and the memory that it is given."""

from typing import Any

import pytest
from refusals import refused

from patch.errors import ConfigError
from patch.preflight import validate_run

SIMULATED = "--simulated-device-memory=1e9"
REFUSED: list[tuple[list[str], str]] = [
    (
        [],
        r"\(position 17 AC\): got auto, expected none, selective, full, or auto with "
        "--simulated-device-memory BYTES: there is no GPU",
    ),
    (
        [SIMULATED, "--precision-align=eager"],
        r"position 17 AC\): got auto, expected none, selective or full, or none at --precision-align: ",
    ),
    ([SIMULATED, "--cpu-offloading"], r"--cpu-offloading .*got true, expected false, or"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_auto_is_refused_with_the_flag_that_cures_it(command: Any, flags: list[str], message: str) -> None:
    with refused(ConfigError, message):
        validate_run(command.parse(*flags, AC="auto").config, command.machine)


@pytest.mark.parametrize("word", ["auto", "none"])
def test_a_simulated_device_that_nothing_enforces_is_noted(command: Any, word: str) -> None:
    notes = validate_run(command.parse(SIMULATED, AC=word, FL="false").config, command.machine)
    assert len(notes) == 1
    assert notes[0].startswith(
        "--simulated-device-memory is only planned for with --optimizer-offload-policy"
    )


def test_layers_that_auto_chooses_itself_have_no_effect(command: Any) -> None:
    flags = (SIMULATED, "--optimizer-offload-policy=static", "--recompute-num-layers=2")
    notes = validate_run(command.parse(*flags, AC="auto", FL="false").config, command.machine)
    assert notes == ["--recompute-num-layers (MP_AC_LAYERS) has no effect without AC=full"]
