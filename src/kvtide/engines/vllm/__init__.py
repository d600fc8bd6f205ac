"""kvtide under vLLM: ``kv_connector="KVTideConnector"``.

Importing this package registers the connector and loads nothing else; the connector itself is
loaded when its name is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtide.engines.vllm.registration import register

if TYPE_CHECKING:
    from kvtide.engines.vllm.connector import KVTideConnector

__all__ = ["KVTideConnector", "register"]


def __getattr__(name: str) -> Any:
    if name != "KVTideConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtide.engines.vllm.connector import KVTideConnector

    return KVTideConnector


register()
