"""What other engines do to a Mooncake pool: a process that keeps it full and asks for its keys.

    python benchmarks/pool_traffic.py HOST:PORT --values 4096 --hot 0.6 --recent 0 --rate 40

It first fills the pool, of which the share ``--hot`` is popular prefixes. Then one client puts new
values all the time, and another asks ``exists`` for the popular keys, and for the share
``--recent`` of the newest others: each key that is asked for is leased, and cannot be evicted. It
says what it did so far, in a line of JSON, for each line that it reads, and ends with the lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

from kvtide.stores.memory_buffer import aligned_buffer
from kvtide.stores.mooncake_package import mooncake_module

VALUE_BYTES = 64 << 10
PUT_KEYS = 16
ASKED_KEYS = 256
ASK_PAUSE_S = 0.005
NO_SPACE = -200


class Client:
    """One of Mooncake's own clients."""

    def __init__(self, master: str) -> None:
        self._native: Any = mooncake_module().MooncakeDistributedStore()
        host = master.rpartition(":")[0]
        assert self._native.setup(host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
        self._buffer = aligned_buffer(VALUE_BYTES)
        assert self._native.register_buffer(self._buffer.ctypes.data, VALUE_BYTES) == 0

    def put(self, keys: list[str]) -> list[int]:
        """Store a value for each key; return Mooncake's codes."""
        places = [int(self._buffer.ctypes.data)] * len(keys)
        return list(self._native.batch_put_from(keys, places, [VALUE_BYTES] * len(keys)))

    def exists(self, keys: list[str]) -> list[int]:
        """Ask for the keys."""
        return list(self._native.batch_is_exist(keys))


class Traffic:
    """A client that writes and one that asks, each on a thread of its own."""

    def __init__(self, master: str, *, num_hot: int, recent: int, rate_mib: float) -> None:
        self.counts: Counter[str] = Counter()
        self._writer, self._asker = Client(master), Client(master)
        self._hot = [f"hot@{number:064x}" for number in range(num_hot)]
        self._recent: deque[str] = deque(maxlen=max(1, recent))
        self._asks_recent = recent > 0
        self._pause_s = PUT_KEYS * VALUE_BYTES / (rate_mib * (1 << 20))
        self._num_written = 0
        self._is_stopped = threading.Event()

    def fill(self, num_values: int) -> None:
        """Put the popular keys, lease them, and fill the rest of the pool with others."""
        for first in range(0, len(self._hot), PUT_KEYS):
            codes = self._writer.put(self._hot[first : first + PUT_KEYS])
            assert set(codes) == {0}, codes
        self._asker.exists(self._hot)
        for _ in range((num_values - len(self._hot)) // PUT_KEYS):
            self._write()

    def run_until_end_of_input(self) -> None:
        """Write and ask until nobody is there any more."""
        threads = [
            threading.Thread(target=self._repeat, args=(work, pause_s))
            for work, pause_s in ((self._write, self._pause_s), (self._ask(), ASK_PAUSE_S))
        ]
        for thread in threads:
            thread.start()
        for _ in sys.stdin:
            print(json.dumps(self.counts), flush=True)
        self._is_stopped.set()
        for thread in threads:
            thread.join()

    def _repeat(self, work: Callable[[], None], pause_s: float) -> None:
        due_s = time.monotonic()
        while not self._is_stopped.is_set():
            work()
            due_s = max(due_s + pause_s, time.monotonic() - pause_s)
            time.sleep(max(0.0, due_s - time.monotonic()))

    def _write(self) -> None:
        numbers = range(self._num_written, self._num_written + PUT_KEYS)
        self._num_written += PUT_KEYS
        keys = [f"cold@{number:064x}" for number in numbers]
        for key, code in zip(keys, self._writer.put(keys), strict=True):
            self.counts["put" if code == 0 else "refused" if code == NO_SPACE else "failed"] += 1
            if code == 0:
                self._recent.append(key)

    def _ask(self) -> Callable[[], None]:
        hot = cycle(self._hot or ["nothing"])

        def ask() -> None:
            keys = list(islice(hot, min(ASKED_KEYS, len(self._hot))))
            keys += list(self._recent) if self._asks_recent else []
            self.counts["asked"] += len(keys)
            self.counts["found"] += self._asker.exists(keys).count(1)

        return ask


def main() -> None:
    """Fill the pool, say so, and go on until the end of input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("master")
    parser.add_argument("--values", type=int, required=True, help="what the pool holds")
    parser.add_argument("--hot", type=float, default=0.6)
    parser.add_argument("--recent", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=20.0, help="MiB per second to put")
    options = parser.parse_args()
    traffic = Traffic(
        options.master,
        num_hot=round(options.hot * options.values),
        recent=round(options.recent * options.values),
        rate_mib=options.rate,
    )
    traffic.fill(options.values)
    print("full", flush=True)
    traffic.run_until_end_of_input()


if __name__ == "__main__":
    main()
