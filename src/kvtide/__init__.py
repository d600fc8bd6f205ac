"""kvtide: an incremental KV-cache pool for LLM inference engines."""

from kvtide.errors import (
    ConfigError,
    EngineRunError,
    KVTideError,
    StoreClosedError,
    StoreError,
    StoreLostError,
    StoreOpenError,
    UnregisteredMemoryError,
    UnsupportedModelError,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "ConfigError",
    "EngineRunError",
    "KVTideError",
    "StoreClosedError",
    "StoreError",
    "StoreLostError",
    "StoreOpenError",
    "UnregisteredMemoryError",
    "UnsupportedModelError",
    "__version__",
]
