"""A store plugin for tests: ``faulty://name?...`` is a FaultyStore over ``memory://name``.

It is found through the entry point in the folder beside it, in this process and in vLLM's.
"""

from __future__ import annotations

from kvtide.stores import open_store
from kvtide.stores.url import StoreUrl
from kvtide.testing import Fault, FaultKind, FaultyStore

opened: dict[str, FaultyStore] = {}
"""The stores opened in this process, by name."""

SCRIPTS: dict[str, list[Fault]] = {}
"""The scripts with which stores are opened in this process, by name."""


def open_faulty(url: StoreUrl) -> FaultyStore:
    """Open ``faulty://NAME``; ``?kind=hang&method=put`` gives a script of one rule."""
    parameters = dict(url.parameters)
    name = url.host or "faulty"
    script = list(SCRIPTS.get(name, ()))
    if "kind" in parameters:
        script.append(Fault(FaultKind(parameters["kind"]), parameters.get("method")))
    inner = parameters.get("inner", f"memory://{name}")
    opened[name] = FaultyStore(open_store(inner), script, hang_limit_s=600.0)
    return opened[name]
