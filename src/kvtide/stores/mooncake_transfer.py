"""How a batch becomes calls of a Mooncake client: cut to its limits, and over TCP gathered.

A value of many segments costs ten times as much over TCP as one of a single segment, so there its
segments are gathered into one registered buffer first. Over RDMA they go as they are, uncopied.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np

from kvtide.core.batch import Batch
from kvtide.errors import StoreOpenError
from kvtide.stores import mooncake_codes as codes
from kvtide.stores.base import Status
from kvtide.stores.copying import gather_values, scatter, scatter_values
from kvtide.stores.memory_buffer import ByteArray, aligned_buffer, region_of
from kvtide.stores.mooncake_client import TCP_LANES, MooncakeClient

MAX_PER_CALL = 1024
"""Keys, and segments, of one native call: lists of them are made under the interpreter lock."""
MAX_PER_TCP_CALL = 8 * TCP_LANES
MAX_TCP_CALLS = 2
"""Calls at a time. Mooncake leaves a call after a minute and carries out what is still in line when
the owner is back, into memory that has become another value's. With so few in line all of them have
timed out before: two calls of eight rounds of 3 s are 48 s."""
_HANGS_AFTER_S = 1.0
"""A call with failed transfers that took this long met an owner that hangs: the next would too."""
GATHER_BYTES = 64 << 20
ROOM_WAIT_S = 0.2
"""How long a put waits for a full pool to evict: it takes tens of milliseconds if it can."""
MAX_ROOM_WAIT_S = 2.0
_ROOM_POLL_S = 0.02

Ask = Callable[[int, Callable[[], list[int]]], list[int]]
"""Makes a native call for so many keys, and returns its codes."""


class MooncakeTransfer:
    """Puts and gets batches through ``client``; ``ask`` stands around each native call.

    ``gathers``, over TCP: values of several segments pass through a buffer of ``gather_bytes``, one
    call at a time; a larger value gets a buffer of its own for the call. An owner that hangs costs
    a batch half a minute at most, and nothing is read or written after the batch has ended.
    """

    def __init__(
        self,
        client: MooncakeClient,
        ask: Ask,
        *,
        gathers: bool,
        gather_bytes: int = GATHER_BYTES,
    ) -> None:
        self._client = client
        self._ask = ask
        self._gathers = gathers
        self._gather_bytes = gather_bytes
        self._max_per_call = MAX_PER_TCP_CALL if gathers else MAX_PER_CALL
        self._turns = threading.BoundedSemaphore(MAX_TCP_CALLS) if gathers else nullcontext()
        self._lock = threading.Lock()
        self._buffer: ByteArray | None = None

    def put(self, batch: Batch) -> list[int]:
        """Return one code per key.

        A full pool refuses a put and only then begins to evict: what had no space is put again,
        until ``ROOM_WAIT_S`` pass without any, and for ``MAX_ROOM_WAIT_S`` in all.
        """
        answers = self._move(batch, self._put)
        refused = _refused(answers)
        now_s = time.monotonic()
        end_s, give_up_s = now_s + MAX_ROOM_WAIT_S, now_s + ROOM_WAIT_S
        while refused and time.monotonic() < min(end_s, give_up_s):
            time.sleep(_ROOM_POLL_S)
            # One value finds out for all of them whether there is room.
            for part in (refused[:1], refused[1:]):
                again = self._move(batch.select(part), self._put)
                for index, code in zip(part, again, strict=True):
                    answers[index] = code
                if _refused(again):
                    break
            left = _refused(answers)
            if len(left) < len(refused):
                give_up_s = time.monotonic() + ROOM_WAIT_S
            refused = left
        return answers

    def get(self, batch: Batch) -> list[int]:
        """Return per key the bytes read, or a code."""
        return self._move(batch, self._get)

    def _move(self, batch: Batch, move: Callable[[Batch], list[int]]) -> list[int]:
        """Move part after part; where an owner hangs, what is left fails without a call."""
        answers = [codes.NO_VALUE] * len(batch)
        hangs = False
        gather_bytes = self._gather_bytes if self._gathers else None
        for indices in _parts(batch, self._max_per_call, gather_bytes):
            found = [codes.TRANSFER_FAILED] * len(indices)
            if not hangs:
                with self._turns:
                    began_s = time.monotonic()
                    found = move(batch.select(indices))
                    took_s = time.monotonic() - began_s
                hangs = codes.TRANSFER_FAILED in found and took_s >= _HANGS_AFTER_S
            for index, code in zip(indices, found, strict=True):
                answers[index] = code
        return answers

    def _put(self, part: Batch) -> list[int]:
        if _has_one_segment_each(part):
            return self._ask(len(part), lambda: self._client.put(part))
        if not self._gathers:
            return self._ask(len(part), lambda: self._client.put_segments(part))
        with self._lock:
            buffer = self._gather_buffer(part.total_bytes)
            whole = _as_one_segment(part, buffer)
            gather_values(whole.addresses[0][0], part.addresses, part.sizes)
            return self._ask(len(part), lambda: self._client.put(whole))

    def _get(self, part: Batch) -> list[int]:
        if _has_one_segment_each(part):
            return self._ask(len(part), lambda: self._client.get(part))
        if not self._gathers:
            return self._ask(len(part), lambda: self._client.get_segments(part))
        with self._lock:
            buffer = self._gather_buffer(part.total_bytes)
            whole = _as_one_segment(part, buffer)
            answers = self._ask(len(part), lambda: self._client.get(whole))
            is_whole = [code == size for code, (size,) in zip(answers, whole.sizes, strict=True)]
            if all(is_whole):
                scatter_values(whole.addresses[0][0], part.addresses, part.sizes)
                return answers
            for index in (index for index, is_ok in enumerate(is_whole) if is_ok):
                scatter(whole.addresses[index][0], part.addresses[index], part.sizes[index])
            return answers

    def _gather_buffer(self, num_bytes: int) -> ByteArray:
        """Return memory for a call: the registered buffer, or where that is too small another.

        Over TCP the client takes any memory. More than 16,384 segments in line would end all that
        it puts from then on, so however many a value has, the client sees one.
        """
        if num_bytes > self._gather_bytes:
            return aligned_buffer(num_bytes)
        if self._buffer is None:
            buffer = aligned_buffer(self._gather_bytes)
            if not self._client.register(region_of(buffer)):
                raise StoreOpenError("Mooncake refuses the buffer that segments are gathered in")
            self._buffer = buffer
        return self._buffer


def _as_one_segment(part: Batch, buffer: ByteArray) -> Batch:
    """Return the same keys with one segment each, one after the other in ``buffer``."""
    lengths = [part.value_bytes(index) for index in range(len(part))]
    starts = (int(buffer.ctypes.data) + np.cumsum([0, *lengths[:-1]])).tolist()
    return Batch(part.keys, [(start,) for start in starts], [(size,) for size in lengths])


def _refused(answers: Sequence[int]) -> list[int]:
    return [
        index for index, code in enumerate(answers) if codes.status_of_put(code) is Status.NO_SPACE
    ]


def _has_one_segment_each(part: Batch) -> bool:
    return all(len(sizes) == 1 for sizes in part.sizes)


def _parts(batch: Batch, max_per_call: int, gather_bytes: int | None) -> Iterator[Sequence[int]]:
    """Yield the keys of each native call: bounded in segments, and in bytes if gathered.

    A gathered value counts as the one segment that the client sees of it.
    Values without bytes are left out: Mooncake holds none. Values of one segment and others do not
    share a call, since the first need no copy; nor do equal keys, of which Mooncake serves one.
    """
    for indices in _rounds(batch):
        part: list[int] = []
        num_segments = num_bytes = 0
        for index in indices:
            sizes = batch.sizes[index]
            value_bytes = sum(sizes)
            num_segments += len(sizes) if gather_bytes is None else 1
            num_bytes += value_bytes
            is_over = num_segments > max_per_call or (
                len(sizes) > 1 and gather_bytes is not None and num_bytes > gather_bytes
            )
            if part and is_over:
                yield part
                part, num_segments, num_bytes = [], len(sizes), value_bytes
            part.append(index)
        if part:
            yield part


def _rounds(batch: Batch) -> list[list[int]]:
    """Return the keys with bytes, those of one segment apart, in lists without equal keys.

    An earlier value of a key is in an earlier list than a later one.
    """
    rounds: dict[tuple[int, bool], list[int]] = {}
    times_seen: Counter[str] = Counter()
    for index, (key, sizes) in enumerate(zip(batch.keys, batch.sizes, strict=True)):
        if sum(sizes):
            rounds.setdefault((times_seen[key], len(sizes) > 1), []).append(index)
            times_seen[key] += 1
    return [rounds[number] for number in sorted(rounds)]
