"""What the connector's constructor takes it gives back where it fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtide.engines.vllm import connector
from kvtide.engines.vllm.connector import KVTideConnector
from kvtide.errors import ConfigError
from kvtide.stores import registry
from kvtide.stores.url import StoreUrl
from tests.engines.vllm.configs import attention_spec, cache_config

pytestmark = pytest.mark.filterwarnings("ignore")


STORE = "memory://connector"


def is_open() -> bool:
    """Tell whether this process still has a handle on the store."""
    return StoreUrl.parse(STORE).identity in registry._registry.open


def config_of(make_config: Callable[..., Any], folder: Path, **options: object) -> Any:
    """Return a configuration that names the connector, with a store of its own."""
    return make_config(
        folder,
        kv_transfer_config={
            "kv_connector": "KVTideConnector",
            "kv_connector_module_path": "kvtide.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": STORE, **options},
        },
    )


def test_a_scheduler_side_that_fails_leaves_no_store_open(
    make_config: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    """The file of the weights' name is read once the store is open."""
    config = config_of(make_config, model_folder, weights_version=f"@{tmp_path / 'missing'}")
    with pytest.raises(ConfigError, match="weights_version names the file"):
        KVTideConnector(config, KVConnectorRole.SCHEDULER, cache_config((attention_spec(), 2)))
    assert not is_open()


def test_a_worker_side_that_fails_leaves_no_store_open(
    make_config: Callable[..., Any], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an engine can be made again in the same process."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no side")

    monkeypatch.setattr(connector, "WorkerSide", fail)
    config = config_of(make_config, model_folder)
    with pytest.raises(RuntimeError, match="no side"):
        KVTideConnector(config, KVConnectorRole.WORKER, cache_config((attention_spec(), 2)))
    assert not is_open()
