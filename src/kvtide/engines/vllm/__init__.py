"""kvtide under vLLM: ``kv_connector="KVTideConnector"``.

Importing this package imports neither vLLM nor torch: the command line imports it where neither is
installed. The connector is loaded when its name is asked for.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from kvtide.engines.vllm.registration import register

__all__ = ["KVTideConnector", "register"]


def __getattr__(name: str) -> Any:
    if name != "KVTideConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("kvtide.engines.vllm.connector").KVTideConnector


# vLLM imports this package by ``kv_connector_module_path``; then it is loaded already.
if "vllm" in sys.modules:
    register()
