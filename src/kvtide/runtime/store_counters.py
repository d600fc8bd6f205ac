"""What a store counted, taken where nothing that it does may end the engine's step."""

from __future__ import annotations

import logging
from collections import Counter

from kvtide.runtime.logs import FaultLog
from kvtide.stores.base import Store

_faults = FaultLog(logging.getLogger("kvtide.runtime"))


def counters_of(store: Store) -> Counter[str]:
    """Return what the store counted since the last call; nothing where it raises."""
    try:
        return store.take_counters()
    except Exception:  # noqa: BLE001 - logged there
        _faults.exception("taking a store's counters failed")
        return Counter()
