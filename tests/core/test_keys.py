"""Keys: hashes by absolute index, identities that never collide, prefixes by id."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.keys import (
    BlockHashes,
    CacheIdentity,
    HashesCutError,
    HashWindow,
    KeyMetadata,
    PoolKey,
    PrefixTable,
    VllmPoolKey,
    namespace_for,
    vllm_namespace,
)
from kvtide.core.topology import WHOLE, Part
from kvtide.testing.requests import fake_hashes

IDENTITY = CacheIdentity(
    engine={"weights": "abc", "dtype": "bfloat16", "block_size": 16, "layers": [0, 1]},
    worker=[[16, [4096, 4096], "HND"]],
)


def slices(length: int) -> st.SearchStrategy[range]:
    """Ranges of absolute indexes with a step, as chunks of several hash blocks need them."""
    return st.builds(
        range, st.integers(8, 8 + length), st.integers(8, 8 + length), st.integers(1, 5)
    )


@given(slices(30))
def test_a_blob_and_a_window_give_the_same_hexes(indices: range) -> None:
    """Jobs carry a blob and lookups read the engine's list: both name chunks alike."""
    hashes = fake_hashes(38)
    blob = BlockHashes.pack(hashes[8:], first=8)
    window = HashWindow(hashes, first=8)
    expected = [hashes[i].hex() for i in indices]
    assert blob.hexes(indices) == expected
    assert window.hexes(indices) == expected
    assert blob.hexes(list(indices)) == window.hexes(tuple(indices)) == expected


@pytest.mark.parametrize("indices", [range(3, 7), (3, 6)], ids=["a range", "single ones"])
def test_a_window_ends_where_it_was_said_to(indices: Sequence[int]) -> None:
    """Though the engine's list has more by now."""
    window = HashWindow(fake_hashes(8), end=6)
    assert len(window.hexes(range(6))) == 6
    with pytest.raises(IndexError, match="outside"):
        window.hexes(indices)


@pytest.mark.parametrize("indices", [range(3, 7), (3, 6)], ids=["a range", "single ones"])
def test_a_list_that_the_engine_has_cut_off_is_not_read_short(indices: Sequence[int]) -> None:
    """Fewer hashes than were asked for would name other chunks."""
    hashes = fake_hashes(8)
    window = HashWindow(hashes)
    assert len(window.hexes(indices)) == len(indices)
    del hashes[5:]
    with pytest.raises(HashesCutError):
        window.hexes(indices)


def test_indexes_are_absolute_and_nothing_below_the_range_can_be_read() -> None:
    """A job that carries hashes 8 to 12 has no hash 7: using it would be a bug, not a wrap."""
    hashes = fake_hashes(12)
    carried = BlockHashes.pack(hashes[8:], first=8)
    assert len(carried) == 12
    assert carried[8] == hashes[8]
    assert carried[9:11] == hashes[9:11]
    assert list(carried) == hashes[8:]
    for index in (7, 12, -1):
        with pytest.raises(IndexError):
            carried[index]
    for outside in (range(7, 9), range(11, 13)):
        with pytest.raises(IndexError):
            carried.hexes(outside)
        with pytest.raises(IndexError):
            HashWindow(hashes, first=8).hexes(outside)


def test_hashes_pickle_as_one_blob() -> None:
    """128 hashes of 32 bytes travel in little more than 4 KiB, and come back equal."""
    carried = BlockHashes.pack(fake_hashes(128), first=1000)
    data = pickle.dumps(carried)
    assert len(data) < 128 * 32 + 200
    assert pickle.loads(data) == carried
    assert hash(pickle.loads(data)) == hash(carried)
    assert carried != "something else"
    assert repr(carried) == "<BlockHashes [1000, 1128)>"


def test_hashes_of_two_lengths_are_refused() -> None:
    """One request has one hash algorithm."""
    with pytest.raises(ValueError, match="one length"):
        BlockHashes.pack([b"1234", b"123"])
    with pytest.raises(ValueError, match="whole number"):
        BlockHashes(b"12345", 4)
    assert len(BlockHashes.pack([])) == 0
    assert HashWindow([]).hexes(range(0)) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, engine={**IDENTITY.engine, "weights": "abx"}),
        replace(IDENTITY, engine={**IDENTITY.engine, "dtype": "fp8"}),
        replace(IDENTITY, engine={**IDENTITY.engine, "block_size": 32}),
        replace(IDENTITY, engine={**IDENTITY.engine, "layers": [1, 0]}),
        replace(IDENTITY, engine={**IDENTITY.engine, "extra": None}),
        replace(IDENTITY, worker=[[16, [4096, 4096], "NHD"]]),
        replace(IDENTITY, deployment="v2"),
        replace(IDENTITY, adapter="v2"),
    ],
)
def test_whatever_the_identity_covers_changes_the_fingerprint(other: CacheIdentity) -> None:
    """Requests that differ in anything the identity covers never share a key."""
    assert other.fingerprint() != IDENTITY.fingerprint()


def test_fields_of_an_identity_do_not_run_into_each_other() -> None:
    """An adapter named like a deployment is another identity (adapter and salt confusion)."""
    adapter = replace(IDENTITY, adapter="X").fingerprint()
    deployment = replace(IDENTITY, deployment="X").fingerprint()
    assert adapter != deployment


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Order of filling, hash seed and process change nothing."""
    code = (
        "from kvtide.core.keys import CacheIdentity\n"
        "print(CacheIdentity({'b': 1, 'a': {'y': 2, 'x': 3}}, [1]).fingerprint())"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("0", "1")
    }
    prints.add(CacheIdentity({"a": {"x": 3, "y": 2}, "b": 1}, [1]).fingerprint())
    assert len(prints) == 1
    assert len(prints.pop()) == 32


def test_an_identity_must_be_plain_data() -> None:
    """An object whose repr holds an address would differ by process."""
    with pytest.raises(TypeError):
        CacheIdentity({"spec": object()}, None).fingerprint()


def test_a_key_says_namespace_part_group_and_hash() -> None:
    """The prefix is built once and a key is one join."""
    namespace = namespace_for("prod", IDENTITY)
    assert namespace == f"prod@kvtide:{IDENTITY.fingerprint()}"
    assert namespace_for("", IDENTITY) == f"kvtide:{IDENTITY.fingerprint()}"
    prefix = PoolKey.build_prefix(KeyMetadata(namespace, Part(1, 2, 3), group_id=1))
    assert (
        PoolKey.build_key_string(prefix, "ab12") == f"{namespace}@pp:1@shard:2@dcp:3@group:1@ab12"
    )


@pytest.mark.parametrize(
    "model,name",
    [("org/model-7b", "model-7b"), ("/models/a/final/", "final"), ("model//", "model"), ("m", "m")],
)
def test_a_key_of_vllm_s_names_the_model_by_the_end_of_its_path(model: str, name: str) -> None:
    """No fingerprint: the operator answers for the name."""
    assert vllm_namespace("", model) == name
    assert vllm_namespace("prod", model) == f"prod@{name}"
    prefix = VllmPoolKey().build_prefix(KeyMetadata(f"prod@{name}", WHOLE, group_id=1))
    assert prefix == f"prod@{name}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:1"


def test_a_part_of_vllm_s_keys_is_named_as_a_place() -> None:
    """Ranks in a row that hold the same bytes have one name: that of their shard."""
    metadata = KeyMetadata("m", Part(pp_rank=4, shard_id=7), 0)
    prefix = VllmPoolKey(dcp_size=4).build_prefix(metadata)
    assert prefix == "m@tp_rank:7@pcp0@dcp3@pp_rank:4@group:0"


def test_prefix_ids_are_announced_once() -> None:
    """The first metadata that uses an id carries its namespace, and no later one."""
    table = PrefixTable()
    first, again, second = table.id_for("a"), table.id_for("a"), table.id_for("b")
    assert first == again != second
    assert table.name_of(second) == "b"
    assert table.take_new() == {first: "a", second: "b"}
    assert table.take_new() == {}
    third = table.id_for("c")
    assert table.take_new() == {third: "c"}
