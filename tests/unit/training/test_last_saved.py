"""The file by which a job's script sees that checkpoints are saved."""

from pathlib import Path

from patch.training.run_hooks import LastSaved


def test_names_the_last_saved_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "log" / "last_saved_iteration.txt"
    file.parent.mkdir()
    hook = LastSaved(tmp_path)
    assert not file.exists()
    for iteration in (10, 20, 15):
        hook.on_save(iteration)
        assert file.read_text() == f"{iteration}\n"


def test_file_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, logged: list[str]) -> None:
    """The checkpoint, which may be in a store, is there all the same."""
    file = tmp_path / "log" / "last_saved_iteration.txt"
    file.mkdir(parents=True)
    LastSaved(tmp_path).on_save(1)
    assert logged == [f"{file} was not written: Is a directory"]
