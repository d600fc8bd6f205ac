"""Batches of every shape reach a real pool whole: cut to the client's limits, gathered or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.stores import mooncake_codes as codes
from kvtide.stores.memory_buffer import aligned_buffer, region_of
from kvtide.stores.mooncake_client import MooncakeClient, connect
from kvtide.stores.mooncake_settings import read_settings
from kvtide.stores.mooncake_transfer import MAX_PER_CALL, MAX_PER_TCP_CALL, MooncakeTransfer
from kvtide.stores.url import StoreUrl
from kvtide.testing.mooncake import MooncakePool
from kvtide.testing.values import value_of
from tests.stores.mooncake_pools import url_of

GATHER_BYTES = 1 << 20


class Counted:
    """A transfer whose native calls are counted, with memory to move to and from."""

    def __init__(self, client: MooncakeClient, *, gathers: bool) -> None:
        self.call_sizes: list[int] = []
        self.transfer = MooncakeTransfer(
            client, self._ask, gathers=gathers, gather_bytes=GATHER_BYTES
        )
        _kept.append(self.transfer)

    def _ask(self, num_keys: int, call: object) -> list[int]:
        assert callable(call)
        self.call_sizes.append(num_keys)
        answers: list[int] = call()
        return answers


@pytest.fixture(scope="module")
def client() -> Iterator[MooncakeClient]:
    """A client of a pool of 128 MiB."""
    with MooncakePool(segment_bytes=128 << 20, lease_ms=2000) as pool:
        client = connect(read_settings(StoreUrl.parse(url_of(pool))))
        yield client
        client.close()


@pytest.fixture(scope="module")
def memory(client: MooncakeClient) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Registered memory: the lower half is written from, the upper half read into."""
    buffer = aligned_buffer(16 << 20)
    assert client.register(region_of(buffer))
    return buffer


_names = Counter[str]()
_kept: list[object] = []  # memory stays mapped for as long as the client knows it


def fresh(num_keys: int) -> list[str]:
    """Return keys that no test used before."""
    _names["next"] += num_keys
    return [f"key-{number}" for number in range(_names["next"] - num_keys, _names["next"])]


def laid_out(keys: Sequence[str], sizes: Sequence[Sequence[int]], start: int) -> Batch:
    """Return a batch whose segments lie one after the other from ``start``, with gaps of 8."""
    addresses = []
    for segments in sizes:
        addresses.append([start + sum(segments[:i]) + 8 * i for i in range(len(segments))])
        start += sum(segments) + 8 * len(segments)
    return Batch(keys, addresses, sizes)


def fill(memory: np.ndarray, batch: Batch) -> None:
    """Write each value's bytes into its segments."""
    base = memory.ctypes.data
    for index, key in enumerate(batch.keys):
        value = value_of(key, batch.value_bytes(index))
        for address, size in zip(batch.addresses[index], batch.sizes[index], strict=True):
            memory[address - base : address - base + size] = memoryview(value[:size])
            value = value[size:]


def read(memory: np.ndarray, batch: Batch, index: int) -> bytes:
    """Return the bytes in the segments of one value."""
    base = memory.ctypes.data
    pieces = zip(batch.addresses[index], batch.sizes[index], strict=True)
    return b"".join(
        memory[address - base : address - base + size].tobytes() for address, size in pieces
    )


def check_round_trip(
    counted: Counted,
    memory: np.ndarray,
    put_sizes: Sequence[Sequence[int]],
    get_sizes: Sequence[Sequence[int]],
) -> None:
    """Put values cut one way and get them cut another way."""
    keys, middle = fresh(len(put_sizes)), memory.ctypes.data + len(memory) // 2
    written = laid_out(keys, put_sizes, memory.ctypes.data)
    fill(memory, written)
    assert counted.transfer.put(written) == [
        codes.OK if written.value_bytes(index) else codes.NO_VALUE for index in range(len(keys))
    ]
    memory[len(memory) // 2 :] = 0xEE
    wanted = laid_out(keys, get_sizes, middle)
    answers = counted.transfer.get(wanted)
    for index, key in enumerate(keys):
        num_bytes = wanted.value_bytes(index)
        assert answers[index] == (num_bytes or codes.NO_VALUE)
        assert read(memory, wanted, index) == value_of(key, num_bytes)


@st.composite
def cuts(draw: st.DrawFn, num_bytes: int) -> list[int]:
    """Cut a length into up to five segments, some perhaps empty."""
    places = sorted(draw(st.lists(st.integers(0, num_bytes), max_size=4)))
    return [end - start for start, end in zip([0, *places], [*places, num_bytes], strict=True)]


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "as-they-are"])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_values_cut_in_any_way_come_back_whole(
    client: MooncakeClient, memory: np.ndarray, gathers: bool, data: st.DataObject
) -> None:
    """Segments concatenate, through the buffer as well as handed over."""
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 4_096, 70_000]), max_size=6))
    put_sizes = [data.draw(cuts(length)) for length in lengths]
    get_sizes = [data.draw(cuts(length)) for length in lengths]
    check_round_trip(Counted(client, gathers=gathers), memory, put_sizes, get_sizes)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "as-they-are"])
def test_a_batch_beyond_the_clients_limits_is_cut(
    client: MooncakeClient, memory: np.ndarray, gathers: bool
) -> None:
    """2,500 keys of one segment, and 200 of 32 segments: no call passes the limits, none fails."""
    counted = Counted(client, gathers=gathers)
    most = MAX_PER_TCP_CALL if gathers else MAX_PER_CALL
    check_round_trip(counted, memory, [[100]] * 2_500, [[100]] * 2_500)
    assert counted.call_sizes == 2 * [*[most] * (2_500 // most), 2_500 % most]
    counted.call_sizes.clear()
    check_round_trip(counted, memory, [[500] * 32] * 200, [[500] * 32] * 200)
    most = GATHER_BYTES // (500 * 32) if gathers else most // 32
    assert max(counted.call_sizes) == most
    assert sum(counted.call_sizes) == 2 * 200


def test_what_does_not_fit_into_the_buffer_goes_in_several_calls_or_as_it_is(
    client: MooncakeClient, memory: np.ndarray
) -> None:
    """Five values of 400 KB pass a buffer of 1 MiB two at a time; one of 1.5 MB does not pass."""
    counted = Counted(client, gathers=True)
    check_round_trip(counted, memory, [[200_000] * 2] * 5, [[100_000] * 4] * 5)
    assert counted.call_sizes == 2 * [2, 2, 1]
    check_round_trip(counted, memory, [[750_000] * 2], [[500_000] * 3])


def test_a_value_of_any_number_of_segments_is_one_to_the_client(
    client: MooncakeClient, memory: np.ndarray
) -> None:
    """More than the client can have in line, larger than the buffer: and the next ones go on."""
    counted = Counted(client, gathers=True)
    check_round_trip(counted, memory, [[100] * 30_000], [[1_500_000, 1_500_000]])
    check_round_trip(counted, memory, [[100]], [[100]])


@pytest.mark.parametrize("is_first_single", [True, False])
def test_of_equal_keys_the_first_value_is_put_and_each_is_read(
    client: MooncakeClient, memory: np.ndarray, is_first_single: bool
) -> None:
    """Whatever shape each comes in, and whatever other keys repeat."""
    key, other = fresh(2)
    shapes = [[10], [4, 6]] if is_first_single else [[4, 6], [10]]
    batch = laid_out([other, other, key, key], [[3], [3], *shapes], memory.ctypes.data)
    memory[: len(memory) // 2] = np.arange(len(memory) // 2, dtype=np.uint64).astype(np.uint8)
    first = read(memory, batch, 2)
    assert first != read(memory, batch, 3)
    counted = Counted(client, gathers=True)
    assert counted.transfer.put(batch) == [codes.OK] * 4
    wanted = laid_out([key, key, other], [[10], [5, 5], [3]], memory.ctypes.data + (8 << 20))
    assert counted.transfer.get(wanted) == [10, 10, 3]
    assert read(memory, wanted, 0) == read(memory, wanted, 1) == first


def test_a_value_of_another_size_is_told_by_its_answer(
    client: MooncakeClient, memory: np.ndarray
) -> None:
    """A buffer too small is refused; one too large says how much there was."""
    (key,) = fresh(1)
    counted = Counted(client, gathers=True)
    assert counted.transfer.put(laid_out([key], [[1_000]], memory.ctypes.data)) == [codes.OK]
    for sizes in ([999], [400, 599]):
        (answer,) = counted.transfer.get(laid_out([key], [sizes], memory.ctypes.data))
        assert answer < 0
    for sizes in ([1_001], [400, 601]):
        (answer,) = counted.transfer.get(laid_out([key], [sizes], memory.ctypes.data))
        assert answer != sum(sizes)


def test_memory_is_registered_once_and_only_where_it_is_new(client: MooncakeClient) -> None:
    """Mooncake refuses memory that overlaps what it knows."""
    buffer = aligned_buffer(3 * 4096)
    start = int(buffer.ctypes.data)
    assert client.register(Region(start + 4096, 4096))
    assert not client.register(Region(start, 3 * 4096))
    assert client.register(Region(start, 4096))
    assert client.register(Region(start + 2 * 4096, 4096))
    _kept.append(buffer)
