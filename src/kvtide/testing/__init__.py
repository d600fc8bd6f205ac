"""For the tests of whoever writes a store or uses one; public API.

:class:`StoreTests` holds a store to the laws of the contract, :class:`StoreMachine` runs random
histories of it beside a dict; both need pytest and Hypothesis, the rest needs neither.
:class:`FaultyStore` fails on a script. :class:`FakeBlocks` stands in for an engine's memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtide.stores.wrappers import CountingStore
from kvtide.testing.blocks import FakeBlocks, FakeFence, byte_layout
from kvtide.testing.faulty_store import Fault, FaultKind, FaultyStore
from kvtide.testing.values import Arena, value_of

if TYPE_CHECKING:
    from kvtide.testing.stateful import StoreMachine
    from kvtide.testing.store_tests import StoreTests

__all__ = [
    "Arena",
    "CountingStore",
    "FakeBlocks",
    "FakeFence",
    "Fault",
    "FaultKind",
    "FaultyStore",
    "StoreMachine",
    "StoreTests",
    "byte_layout",
    "value_of",
]

_LAZY = {"StoreMachine": "kvtide.testing.stateful", "StoreTests": "kvtide.testing.store_tests"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module attribute is
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
