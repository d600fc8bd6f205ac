"""A connector that does nothing: configurations name it where the connector is not tested."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA


class StubConnector(KVConnectorBase_V1, SupportsHMA):
    """Only ever looked up, never made."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Take what vLLM hands to a connector."""
        super().__init__(vllm_config, role, kv_cache_config)
