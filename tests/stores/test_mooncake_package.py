"""Mooncake's package and libraries are found, or the message says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.errors import StoreOpenError
from kvtide.stores import mooncake_package, open_store

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install-mooncake-libraries"


def test_the_module_and_the_programs_are_found() -> None:
    """With the libraries that belong to them."""
    assert hasattr(mooncake_package.mooncake_module(), "MooncakeDistributedStore")
    for name in ("mooncake_master", "mooncake_client"):
        program = mooncake_package.mooncake_program(name)
        done = subprocess.run(
            [program, "--version"],
            env=mooncake_package.program_environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert name in done.stdout


def test_a_missing_package_is_named() -> None:
    """In a process that does not see it."""
    code = (
        "import sys, importlib.util as util; found = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'mooncake' else found(name, *more)\n"
        "from kvtide.stores import open_store\n"
        "try: open_store('mooncake://127.0.0.1:1')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("StoreOpenError")
    assert "pip install mooncake-transfer-engine-non-cuda" in done.stdout


def test_missing_libraries_are_named_with_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the distributions people have, and without root."""
    monkeypatch.setattr(mooncake_package, "LIBRARIES", ("libnl-3.so.200", "libnothere.so.1"))
    with pytest.raises(StoreOpenError) as caught:
        open_store("mooncake://127.0.0.1:1")
    message = str(caught.value)
    assert "libnothere.so.1" in message
    assert "libnl-3.so.200" not in message
    for words in ("apt-get install libibverbs1", "dnf install", "install-mooncake-libraries"):
        assert words in message


def test_a_missing_program_is_named() -> None:
    """As one of a newer package may be."""
    with pytest.raises(StoreOpenError, match="no program 'mooncake_oven'"):
        mooncake_package.mooncake_program("mooncake_oven")


def test_programs_find_the_libraries_of_this_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In front of what the operator names, and only where there are any."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    assert mooncake_package.program_environment()["LD_LIBRARY_PATH"] == "/opt/lib"
    folder = tmp_path / mooncake_package.FOLDER
    folder.mkdir(parents=True)
    assert mooncake_package.program_environment()["LD_LIBRARY_PATH"] == f"{folder}:/opt/lib"


def test_the_script_does_nothing_where_the_libraries_are() -> None:
    """It may be run again and again."""
    done = subprocess.run(
        [str(SCRIPT), sys.executable], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
