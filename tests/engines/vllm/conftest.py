"""What the tests with a real engine share: its environment, set before vLLM is imported, a model."""

import importlib.util
import os
from pathlib import Path

import pytest

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread on every side of a comparison: a connector changes vLLM's default.
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    # The engine in this process: it starts in seconds, and a test can look inside.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(ENVIRONMENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs vLLM where it is not installed; ``make test`` installs it."""
    if importlib.util.find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(reason="vLLM is not installed: `make test` installs it")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, made once."""
    from kvtide.engines.vllm.demo_model import build

    folder = tmp_path_factory.mktemp("models") / "a" / "final"
    build(folder)
    return folder
