"""The connector's name is known to vLLM as soon as the package is imported."""

from __future__ import annotations

import os
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


STUB = """
import sys, types
registered = []
factory = types.ModuleType("factory")
factory.KVConnectorFactory = types.SimpleNamespace(
    register_connector=lambda *names: registered.append(names))
place = "vllm.distributed.kv_transfer.kv_connector.factory"
parts = place.split(".")
for number in range(1, len(parts)):
    sys.modules[".".join(parts[:number])] = types.ModuleType("package")
sys.modules[place] = factory
import kvtide.engines.vllm
print(registered, sorted(name for name in sys.modules if name.startswith("kvtide.")),
      "torch" in sys.modules)
"""


def test_importing_the_package_loads_no_connector() -> None:
    """Every process of the engine may import it: only the name is registered."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    done = subprocess.run(
        [sys.executable, "-c", STUB],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = [
        "kvtide.engines",
        "kvtide.engines.vllm",
        "kvtide.engines.vllm.registration",
        "kvtide.errors",
    ]
    name = (CONNECTOR_NAME, "kvtide.engines.vllm", CONNECTOR_NAME)
    assert done.stdout.strip() == f"{[name]} {loaded} False"
