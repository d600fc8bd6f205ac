"""Where KV cache is kept: the store contract, and stores opened by URL."""

from kvtide.stores.base import Status, Store
from kvtide.stores.registry import open_store

__all__ = ["Status", "Store", "open_store"]
