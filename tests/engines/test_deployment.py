"""Which weights are served: a name, a file that holds one, or after a reset a random name."""

from pathlib import Path

import pytest

from kvtide.engines.deployment import Deployment
from kvtide.errors import ConfigError


def test_without_a_file_a_reset_takes_a_name_that_nobody_else_has() -> None:
    """A counter would let two engines with different new weights meet; 128 random bits do not."""
    for version in ("", "r7"):
        one, other = Deployment(version), Deployment(version)
        assert one.name == other.name == version
        one.change()
        other.change()
        assert one.name != other.name
        assert len(one.name) == len(other.name) == 32


def test_with_a_file_engines_that_read_the_same_name_go_on_sharing(tmp_path: Path) -> None:
    """The file is read at the start and at each reset, and white space around the name is cut."""
    file = tmp_path / "version"
    file.write_text("r7\n")
    reset = Deployment(f"@{file}")
    assert reset.name == "r7"
    file.write_text(" r8 ")
    assert reset.name == "r7"
    reset.change()
    assert reset.name == "r8" == Deployment(f"@{file}").name


def test_a_file_that_fails_at_a_reset_shares_nothing(tmp_path: Path) -> None:
    """Nobody can tell what the new weights are called: a random name is safe."""
    file = tmp_path / "version"
    file.write_text("r7")
    deployment = Deployment(f"@{file}")
    file.unlink()
    deployment.change()
    assert len(deployment.name) == 32


@pytest.mark.parametrize("content", [None, "", " \n", "x" * 257])
def test_a_file_that_fails_at_the_start_is_refused(content: str | None, tmp_path: Path) -> None:
    """Missing, empty or too long: the message names the file and what it should hold."""
    file = tmp_path / "version"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"weights_version names the file {file}"):
        Deployment(f"@{file}")
