"""What must hold inside a local pool, whatever happened to it."""

from __future__ import annotations

from kvtide.stores.local import LocalStore
from kvtide.stores.local_index import ENTRY

PAGE = 4096


def check_extents(store: LocalStore) -> dict[str, int]:
    """Check that the extents cover the slab without gap or overlap, and agree with the keys.

    Returns the pages that are free, hold values, and are reserved.
    """
    pages = {"free": 0, "value": 0, "reserved": 0}
    index = store._index
    with index._env.begin() as txn:
        expected_first, by_key = 0, {}
        for page, record in txn.cursor(index._extents):
            first, num_pages = int.from_bytes(page, "big"), int.from_bytes(record[:4], "little")
            assert first == expected_first
            expected_first += num_pages
            pages[("free", "value", "reserved")[record[4]]] += num_pages
            if record[4] == 1:
                by_key[bytes(record[13:])] = (first, record[5:13])
        assert expected_first == store.size_bytes // PAGE
        found = {}
        for key, entry in txn.cursor(index._keys):
            generation, _, first = ENTRY.unpack(entry)
            found[bytes(key)] = (first, generation.to_bytes(8, "little"))
        assert found == by_key
    return pages
