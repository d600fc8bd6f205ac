"""A process that puts into a local pool and stops or dies where it is told to; run by the tests.

    python local_writer.py PATH SEED SIGNAL PHASE NUM_PUTS

It prints a line after each put, and sends itself SIGNAL in PHASE of the put after NUM_PUTS.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvtide.stores import local
from kvtide.stores.local import LocalStore
from kvtide.testing import Arena, value_of

NUM_KEYS = 300
PHASES = (
    "before reserving commits",
    "reserved",
    "generations odd",
    "copied",
    "generations even",
    "before publishing commits",
    "published",
    "anywhere",
)


def seeded(seed: int | str) -> random.Random:
    """Return a generator that always says the same."""
    return random.Random(seed)


def size_of(key: str) -> int:
    """Return the size every process gives the value of ``key``, in bytes."""
    return seeded(key).choice([700, 5_000, 40_000, 150_000])


def choose(generator: random.Random, num_keys: int) -> list[tuple[str, bytes]]:
    """Return keys to put, with their values."""
    keys = [f"key-{generator.randrange(NUM_KEYS)}" for _ in range(num_keys)]
    return [(key, value_of(key, size_of(key))) for key in keys]


class _Trap:
    """Sends a signal when armed and reached."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        self.is_armed = False

    def spring(self) -> None:
        if self.is_armed:
            self.is_armed = False
            os.kill(os.getpid(), self.signal_number)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*args: Any, **kwargs: Any) -> Any:
            self.spring()
            return call(*args, **kwargs)

        return trapped

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.spring()
            return result

        return trapped


class _TrappedEnv:
    """An LMDB environment whose write transactions reach the trap before they commit."""

    def __init__(self, env: Any, trap: _Trap) -> None:
        self._env, self._trap = env, trap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        txn = self._env.begin(*args, **kwargs)
        return _TrappedTxn(txn, self._trap) if kwargs.get("write") else txn


class _TrappedTxn:
    def __init__(self, txn: Any, trap: _Trap) -> None:
        self._txn, self._trap = txn, trap

    def __enter__(self) -> Any:
        return self._txn.__enter__()

    def __exit__(self, *args: object) -> Any:
        self._trap.spring()
        return self._txn.__exit__(*args)


def install(store: LocalStore, trap: _Trap, phase: str) -> Callable[[], None]:
    """Place the trap; return what arms it."""
    index = store._index
    env = index._env

    def arm() -> None:
        trap.is_armed = True

    def around(method: str) -> None:
        call = getattr(index, method)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            index._env = _TrappedEnv(env, trap)  # type: ignore[assignment]
            return call(*args, **kwargs)

        setattr(index, method, trapped)

    if phase == "before reserving commits":
        around("reserve")
    elif phase == "reserved":
        index.reserve = trap.after(index.reserve)  # type: ignore[method-assign]
    elif phase == "generations odd":
        local.gather = trap.before(local.gather)
    elif phase == "copied":
        local.gather = trap.after(local.gather)
    elif phase == "generations even":
        index.publish = trap.before(index.publish)  # type: ignore[method-assign]
    elif phase == "before publishing commits":
        around("publish")
    elif phase == "published":
        index.publish = trap.after(index.publish)  # type: ignore[method-assign]
    return arm


def main(arguments: Sequence[str]) -> None:
    """Put until the trap springs, or until killed."""
    path, seed, signal_name, phase, num_puts = arguments
    store = LocalStore(path, lock_timeout_s=20.0)
    arena = Arena(store)
    generator = seeded(int(seed))
    trap = _Trap(signal.Signals[signal_name])
    arm = install(store, trap, phase)
    number = 0
    while True:
        if number == int(num_puts):
            arm()
        # A batch with a key of its own, so that there is something to reserve.
        own = f"own-{seed}-{number}"
        statuses = arena.put([*choose(generator, 3), (own, value_of(own, size_of(own)))])
        sys.stdout.write(f"{number} {' '.join(status.value for status in statuses)}\n")
        sys.stdout.flush()
        number += 1


if __name__ == "__main__":
    main(sys.argv[1:])
