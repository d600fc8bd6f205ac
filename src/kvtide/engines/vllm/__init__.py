"""kvtide under vLLM: name ``kvtide.engines.vllm`` as ``kv_connector_module_path``.

Importing this package imports neither vLLM nor torch; asking it for ``KVTideConnector`` does.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KVTideConnector", "register"]


def register() -> None:
    """Make ``KVTideConnector`` known to vLLM; vLLM calls this in every one of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM refuses to register a name twice, and loads plugins more than once in some processes.
    if "KVTideConnector" not in KVConnectorFactory._registry:  # noqa: SLF001
        KVConnectorFactory.register_connector(
            "KVTideConnector", "kvtide.engines.vllm.connector", "KVTideConnector"
        )


def __getattr__(name: str) -> Any:
    if name == "KVTideConnector":
        return importlib.import_module("kvtide.engines.vllm.connector").KVTideConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
