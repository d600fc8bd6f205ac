"""Mooncake's own client, as vLLM's in-tree connector opens it, and what its calls put."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def native_client(master: str, caches: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return Mooncake's client as vLLM's connector opens it, and how it is to put.

    ``caches`` lie in one piece of memory, which it may read.
    """
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    from vllm.distributed.mooncake_store import MooncakeStoreConfig, setup_mooncake_store

    native = MooncakeDistributedStore()
    config = MooncakeStoreConfig(
        metadata_server="P2PHANDSHAKE",
        master_server_address=master,
        protocol="tcp",
        device_name="",
        mode="standalone-store",
        global_segment_size=0,
        local_buffer_size=16 << 20,
    )
    setup_mooncake_store(native, config, master.rpartition(":")[0])
    storage = next(iter(caches.values())).untyped_storage()
    assert native.register_buffer(storage.data_ptr(), storage.nbytes()) == 0
    return native, ReplicateConfig()


class WatchedClient:
    """Mooncake's client, which counts the keys it put.

    ``note`` is told of each: the key, its bytes and the client's code, negative for a failure.
    Where ``names`` are set, keys are looked for and put under them.
    """

    def __init__(self, native: Any, note: Callable[[str, int, int], None] | None = None) -> None:
        self._native = native
        self._note = note
        self.names = ""
        self.num_put = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Pass the question on."""
        return list(self._native.batch_is_exist(self._named(keys)))

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], addresses: Any, sizes: Sequence[Sequence[int]], *how: Any
    ) -> list[int]:
        """Put, and count."""
        named = self._named(keys)
        codes = list(self._native.batch_put_from_multi_buffers(named, addresses, sizes, *how))
        self.num_put += sum(code >= 0 for code in codes)
        if self._note is not None:
            for key, value_sizes, code in zip(keys, sizes, codes, strict=True):
                self._note(key, sum(value_sizes), code)
        return codes

    def _named(self, keys: Sequence[str]) -> Sequence[str]:
        return [f"{self.names}/{key}" for key in keys] if self.names else keys
