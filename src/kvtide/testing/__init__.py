"""For the tests of whoever writes a store or uses one; public API.

:class:`StoreTests` holds a store to the laws of the contract, :class:`StoreMachine` runs random
histories of it beside a dict; both need pytest and Hypothesis, the rest needs neither.
:class:`FaultyStore` fails on a script. :class:`MooncakePool` is a real Mooncake pool on loopback.
:class:`FakeBlocks` stands in for an engine's memory. :class:`ScriptedEngine` drives the whole pool
as vLLM does, for models of any attention kinds and with no engine installed;
:func:`check_engine`, :func:`check_idle` and :func:`check_store` say what must hold of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtide.stores.wrappers import CountingStore
from kvtide.testing.blocks import FakeBlocks, FakeFence, byte_layout
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_checks import check_engine, check_idle, check_store
from kvtide.testing.engine_setup import EngineSetup, HookOrder, ManualClock, StepRecord
from kvtide.testing.faulty_store import Fault, FaultKind, FaultyStore
from kvtide.testing.interrupts import InterruptedStore
from kvtide.testing.mooncake import MooncakePool
from kvtide.testing.values import Arena, value_of

if TYPE_CHECKING:
    from kvtide.testing.stateful import StoreMachine
    from kvtide.testing.store_tests import StoreTests

__all__ = [
    "Arena",
    "CountingStore",
    "EngineSetup",
    "FakeBlocks",
    "FakeFence",
    "Fault",
    "FaultKind",
    "FaultyStore",
    "HookOrder",
    "InterruptedStore",
    "ManualClock",
    "MooncakePool",
    "ScriptedEngine",
    "StepRecord",
    "StoreMachine",
    "StoreTests",
    "byte_layout",
    "check_engine",
    "check_idle",
    "check_store",
    "value_of",
]

_LAZY = {"StoreMachine": "kvtide.testing.stateful", "StoreTests": "kvtide.testing.store_tests"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module attribute is
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
