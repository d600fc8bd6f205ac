"""The connector's name is known to vLLM as soon as the package is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import kvtide.engines.vllm as package
from kvtide.engines.vllm.registration import CONNECTOR_NAME, register


def test_importing_the_package_registers_the_connector() -> None:
    """``MultiConnector`` looks children up by name, so the name must be there."""
    assert CONNECTOR_NAME in KVConnectorFactory._registry


def test_registering_again_is_harmless() -> None:
    """A plugin, an import and a module path may all register in one process."""
    register()
    package.register()
    assert CONNECTOR_NAME in KVConnectorFactory._registry


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    """Only the connector is loaded lazily."""
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        package.Nonsense  # noqa: B018


def test_importing_the_package_loads_no_connector() -> None:
    """Every process of the engine may import it: only the name is registered."""
    code = (
        "import sys, kvtide.engines.vllm as package;"
        "loaded = [m for m in sys.modules if m.startswith('kvtide.')];"
        "print(sorted(loaded))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == str(
        ["kvtide.engines", "kvtide.engines.vllm", "kvtide.engines.vllm.registration"]
    )
