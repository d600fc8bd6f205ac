"""Where KV cache is kept: the store contract, and stores opened by URL."""

from kvtide.stores.base import Status, Store
from kvtide.stores.registry import open_store, url_for_lookups
from kvtide.stores.url import StoreUrl

__all__ = ["Status", "Store", "StoreUrl", "open_store", "url_for_lookups"]
