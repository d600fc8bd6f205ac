"""What importing kvtide does not bring along."""

import subprocess
import sys

import pytest

BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked by this test")

sys.meta_path.insert(0, Refuse())
"""

EVERY_MODULE = """
import importlib, pkgutil
import {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    importlib.import_module(module.name)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "package,blocked",
    [
        ("kvtide.core", {"torch", "vllm", "lmdb", "xxhash"}),
        ("kvtide.cli", {"torch", "vllm", "transformers"}),
        ("kvtide.stores", {"torch", "vllm"}),
    ],
)
def test_a_package_imports_without_what_it_must_not_need(package: str, blocked: set[str]) -> None:
    """Every module of the package imports where those are not to be had."""
    done = run(BLOCK.format(blocked=blocked) + EVERY_MODULE.format(package=package))
    assert done.returncode == 0, done.stderr


def test_the_command_line_starts_without_an_engine() -> None:
    """``kvtide --help`` and ``kvtide demo --help`` need no vLLM."""
    for verb in ([], ["demo"]):
        call = f"import sys; sys.argv = ['kvtide', *{verb!r}, '--help']\n"
        code = BLOCK.format(blocked={"vllm", "torch"}) + call
        done = run(code + "from kvtide.cli import main; main()")
        assert done.returncode == 0, done.stderr
        assert "Usage: kvtide" in done.stdout


def test_the_command_line_runs_as_a_module() -> None:
    """``python -m kvtide`` is ``kvtide``, and calls itself so."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: kvtide [OPTIONS]")


def test_the_connector_is_looked_up_only_when_asked_for() -> None:
    """Importing the vLLM package imports neither vLLM nor torch; unknown names are refused."""
    code = (
        "import sys, kvtide.engines.vllm as package\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)\n"
        "assert not hasattr(package, 'Nothing')\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
