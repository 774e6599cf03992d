"""A file that cannot be written is refused before the work of a tool begins."""

from importlib import import_module

import pytest

WRITERS = ["doctor.__main__", "inspect_checkpoint", "plan", "preview_data", "verify_alignment"]


@pytest.mark.parametrize("module", WRITERS)
def test_a_file_in_a_folder_that_is_not_there_is_refused_first(
    module: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"toolkits.{module}").main(["--json", "nowhere/file"])
    said = "argument --json: got nowhere/file, expected a file in a folder that is there"
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "flag"), [("plan", "--devices-per-node"), ("plan", "--nodes"), ("doctor.__main__", "--nproc")]
)
@pytest.mark.parametrize("number", ["9" * 21, "9" * 5000, "10000000", "-1e-3", "x"])
def test_a_number_without_sense_is_refused_in_a_short_line(
    module: str, flag: str, number: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"toolkits.{module}").main([flag, number])
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "expected a whole number from 1 to 100000" in line and len(line) < 400


@pytest.mark.parametrize("words", [["hf2mcore", "--save", "x"], ["mcore2hf", "--load", "x", "--save"]])
def test_help_names_the_command_that_was_typed_and_urls_are_refused_without_secrets(
    words: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkits import convert

    url = "s3://me:hush@bucket/model"
    line = [*words, "--load", url] if words[0] == "hf2mcore" else [*words, url]
    for name, *typed in (("llama-patch convert", "/bin/llama-patch", "convert"), ("toolkits.convert", "x")):
        monkeypatch.setattr("sys.argv", typed)
        with pytest.raises(SystemExit) as ended:
            convert.main(line)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and name in said and "hush" not in said
        assert "got a URL (s3://...), expected a path on this machine" in said
