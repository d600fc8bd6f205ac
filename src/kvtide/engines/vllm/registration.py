"""Tell vLLM the connector's name.

``kv_connector_module_path`` is enough for a connector on its own, but inside ``MultiConnector``
vLLM looks every child that returns statistics up in its registry, whatever its module path.
"""

from __future__ import annotations

import contextlib

CONNECTOR_NAME = "KVTideConnector"
MODULE_PATH = "kvtide.engines.vllm"


def register() -> None:
    """Register the connector with vLLM's factory. Calling it again is harmless.

    It imports vLLM's factory but not the connector, so it may run in every process; it also
    serves as an entry point of ``vllm.general_plugins``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # It refuses a name that was registered before: by the plugin, or by another import.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR_NAME, MODULE_PATH, CONNECTOR_NAME)
