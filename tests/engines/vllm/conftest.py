"""What the tests around vLLM share: an environment, set before vLLM is imported, and models."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.environment import ENVIRONMENT
from tests.engines.vllm.pools import SharedMooncake, pool_of, shared_mooncake

HERE = Path(__file__).parent
os.environ.update(ENVIRONMENT)
# A store plugin that fails on a script, installed as any plugin would be: by its metadata.
sys.path.append(str(HERE / "plugin"))

if importlib.util.find_spec("vllm") is None:
    # `make test` installs vLLM; only `make test-fast` runs without, and leaves these out.
    collect_ignore = [
        path.name for path in HERE.glob("test_*.py") if not path.name.startswith("test_demo")
    ]
else:
    # vLLM and torch warn while they are imported; warnings of ours stay errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.engine.core")


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Any]:
    """Build a real ``VllmConfig`` for a folder, with engine arguments of one's own."""
    from tests.engines.vllm.configs import engine_config

    return engine_config


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A small Llama's folder."""
    from tests.engines.model_folders import make_folder

    return make_folder(tmp_path / "model")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights that can be run, made once."""
    from kvtide.engines.vllm.demo_model import build

    folder = tmp_path_factory.mktemp("models") / "a" / "final"
    build(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for engines that do not compute with what it holds."""
    from tests.engines.model_folders import make_folder

    return make_folder(tmp_path_factory.mktemp("modelled") / "model")


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a local pool for the engines of one test."""
    return f"local://{tmp_path}/pool?size=64MiB"


@pytest.fixture(scope="session")
def mooncake() -> Iterator[SharedMooncake]:
    """A real Mooncake master and owner, started once."""
    with shared_mooncake() as shared:
        yield shared


@pytest.fixture
def pool_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty pool: a local one, or what ``ON_EACH_STORE`` says."""
    with pool_of(getattr(request, "param", "local"), request) as url:
        yield url
