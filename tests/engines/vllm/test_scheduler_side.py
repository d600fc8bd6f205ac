"""The scheduler's half of the connector, as far as it needs no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtide.config import PoolConfig
from kvtide.core.groups import FullAttention
from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.core.topology import ParallelSizes
from kvtide.engines.lora import PENDING, AdapterDigests
from kvtide.engines.vllm.formats import FORMATS
from kvtide.engines.vllm.metadata import KVTideHandshake
from kvtide.engines.vllm.names import IdentityNames, ModelNames, Names
from kvtide.engines.vllm.scheduler_side import SchedulerSide
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.errors import ConfigError
from kvtide.stores.memory import MemoryStore
from tests.engines.test_lora import wait_for

PLAN = GroupPlan(
    groups=(FullAttention(16),),
    group_ids=(0,),
    hash_block_size=16,
    specs=({},),
    num_layers=(1,),
)


class Pool:
    """vLLM's block pool, as far as the start and a reset read it."""

    num_gpu_blocks = 100
    blocks = [None] * num_gpu_blocks

    def __init__(self) -> None:
        self.num_in_use = 0

    def get_num_free_blocks(self) -> int:
        """All but the null block, and those that a test says are in use."""
        return self.num_gpu_blocks - 1 - self.num_in_use

    def get_cached_block(self, block_hash: bytes, group_ids: list[int]) -> None:
        """Nothing is cached."""


class Manager:
    """vLLM's cache manager likewise."""

    def __init__(self) -> None:
        self.block_pool = Pool()


def side(sizes: ParallelSizes | None = None, **options: object) -> SchedulerSide:
    """A scheduler side that knows its cache manager."""
    config = PoolConfig.from_mapping(options)
    names: Names = IdentityNames("", {"weights": "w"}, "")
    if config.key_format == "vllm":
        names = ModelNames(config.cache_prefix, "/models/final")
    half = SchedulerSide(
        config, PLAN, FORMATS[config.key_format], names, MemoryStore(), sizes=sizes
    )
    half.bind(Manager())
    return half


def layout(payload_bytes: int, description: str = "bytes") -> KVTideHandshake:
    """A rank's handshake."""
    return KVTideHandshake(StoreLayout((GroupLayout(16, (payload_bytes,), description),)))


def test_budgets_below_one_block_are_refused_together() -> None:
    """Nothing would ever be saved or loaded, and nothing would say why."""
    half = side(staging_size="1MiB", max_load_bytes="1MiB")
    with pytest.raises(ConfigError) as refused:
        half.agree_on_layouts([layout(4 << 20)])
    assert [fault.split(" is ")[0] for fault in refused.value.faults] == [
        "staging_size",
        "max_load_bytes",
    ]
    half.close()


def test_ranks_that_lay_bytes_out_differently_are_refused() -> None:
    """Their values would not be exchangeable under one key."""
    half = side(ParallelSizes(tp_size=2))
    first, second = layout(4096), layout(4096, "other")
    with pytest.raises(ConfigError, match="differently"):
        half.agree_on_layouts([first, replace(second, rank=1)])
    with pytest.raises(ConfigError, match="list KVTideConnector first"):
        half.agree_on_layouts([])
    half.close()


def test_before_the_ranks_have_told_their_layout_nothing_happens() -> None:
    """No key can be named yet."""
    half = side()
    assert not half.has_pins
    assert half.take_counters() == {}
    half.reset()
    half.on_finished(plain_request())
    half.close()


class SlowDigests:
    """Digests that come when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.answer: str | None = None
        self.is_known = False

    def __call__(self, path: str) -> str | None:
        """Wait for the test, then answer."""
        wait_for(lambda: self.is_known)
        return self.answer


@pytest.fixture
def digests() -> SlowDigests:
    """The digests of :func:`half`, and its clock."""
    return SlowDigests()


@pytest.fixture
def half(digests: SlowDigests) -> Iterator[SchedulerSide]:
    """A scheduler side that knows everything but its adapters."""
    config = PoolConfig.from_mapping({"lookup_wait_ms": 50})
    names = IdentityNames("", {"weights": "w"}, "")
    names.adapters = AdapterDigests(digest=digests)
    half = SchedulerSide(
        config, PLAN, FORMATS["kvtide"], names, MemoryStore(), clock=lambda: digests.now_s
    )
    half.bind(Manager())
    half.agree_on_layouts([layout(4096)])
    yield half
    digests.is_known = True
    half.close()


def request_with_adapter(path: Path, request_id: str = "r") -> Any:
    """One of vLLM's requests, of ten blocks, with an adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(160)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest("name", 1, str(path)),
        block_hasher=get_request_block_hasher(16, sha256),
    )


def prefix_of(half: SchedulerSide, request: Any) -> int | None:
    """The name of the request's keys in the core, ``None`` where it goes without the cache."""
    assert half._scheduler is not None
    return half._scheduler._trackers[request.request_id].prefix_id


def answer_of(half: SchedulerSide, request: Any) -> tuple[int | None, bool]:
    """The answer to vLLM's question, once the lookup has ended."""
    wait_for(lambda: half.match(request, 0)[0] is not None)
    return half.match(request, 0)


def test_a_request_waits_for_its_adapter_and_then_has_the_cache(
    half: SchedulerSide, digests: SlowDigests, tmp_path: Path
) -> None:
    """Its first digest is computed while vLLM asks again; later requests wait for nothing."""
    request = request_with_adapter(tmp_path)
    half.on_new_request(request)
    assert half.match(request, 0) == (None, False)
    digests.answer, digests.is_known = "digest", True
    assert answer_of(half, request) == (0, False)
    assert prefix_of(half, request) is not None
    second = request_with_adapter(tmp_path, "s")
    half.on_new_request(second)
    assert prefix_of(half, second) == prefix_of(half, request)


def test_an_adapter_that_is_not_known_in_time_is_asked_for_once_more_at_admission(
    half: SchedulerSide, digests: SlowDigests, tmp_path: Path
) -> None:
    """What became known meanwhile lets the request save what it computes."""
    request = request_with_adapter(tmp_path)
    half.on_new_request(request)
    assert half.match(request, 0) == (None, False)
    digests.now_s = 0.06
    assert half.match(request, 0) == (0, False)
    digests.answer, digests.is_known = "digest", True
    wait_for(lambda: half._namespace_of(request) is not None)
    half.on_allocated(request, 0)
    assert prefix_of(half, request) is not None


def test_an_adapter_that_is_never_known_costs_no_more_than_the_cache(
    half: SchedulerSide, digests: SlowDigests, tmp_path: Path
) -> None:
    """The request is computed without; a reset does not change that, and nothing is kept of it."""
    request = request_with_adapter(tmp_path)
    half.on_new_request(request)
    half.match(request, 0)
    digests.now_s = 0.06
    assert half.match(request, 0) == (0, False)
    half.on_allocated(request, 0)
    assert prefix_of(half, request) is None
    half.reset()
    assert prefix_of(half, request) is None
    half.on_finished(request)
    assert not half._held_back
    assert not half._views


def test_an_id_that_begins_a_new_life_is_held_back_anew(
    half: SchedulerSide, digests: SlowDigests, tmp_path: Path
) -> None:
    """The core forgets the old life at once; an unreadable adapter goes without the cache."""
    assert half._scheduler is not None
    plain = request_with_adapter(tmp_path)
    plain.lora_request = None
    half.on_new_request(plain)
    assert prefix_of(half, plain) is not None
    half.on_new_request(request_with_adapter(tmp_path))
    assert not half._scheduler._trackers
    digests.is_known = True
    again = request_with_adapter(tmp_path)
    wait_for(lambda: half.match(again, 0) == (0, False))
    assert prefix_of(half, again) is None


# ------------------------------------------------------------------------------ waiting


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_empty_step_must_rest_while_a_request_waits_for_the_pool(
    own_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that computes, that nobody waits in, or of an engine in a process of its own."""
    from vllm.v1.core.sched.output import SchedulerOutput

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if own_loop else "0")
    half = side()
    half.agree_on_layouts([layout(4096)])
    try:
        empty, busy = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
        busy.total_num_scheduled_tokens = 1
        assert not half.build_metadata(empty).must_rest
        request = plain_request()
        half.on_new_request(request)
        assert half.build_metadata(empty).must_rest is not own_loop
        assert not half.build_metadata(busy).must_rest
        assert answer_of(half, request) == (0, False)
        half.on_finished(request)
        assert not half.build_metadata(empty).must_rest
    finally:
        half.close()


# ------------------------------------------------------------ the keys of the in-tree connector


@pytest.fixture
def plain_half() -> Iterator[SchedulerSide]:
    """A scheduler side whose keys are those of vLLM's in-tree connector."""
    made = side(key_format="vllm", cache_prefix="prod")
    made.agree_on_layouts([layout(4096)])
    yield made
    made.close()


def plain_request(request_id: str = "r") -> Any:
    """One of vLLM's requests without an adapter."""
    request = request_with_adapter(Path("unused"), request_id)
    request.lora_request = None
    return request


def test_in_vllm_s_format_lookups_ask_for_the_in_tree_connector_s_keys(
    plain_half: SchedulerSide,
) -> None:
    """Its name of the model, of the rank and of the group."""
    asked: list[str] = []
    store = plain_half._store
    exists = store.exists
    store.exists = lambda keys: asked.extend(keys) or exists(keys)  # type: ignore[method-assign, func-returns-value]
    request = plain_request()
    plain_half.on_new_request(request)
    assert answer_of(plain_half, request) == (0, False)
    prefix = "prod@final@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0"
    assert asked == [f"{prefix}@{value.hex()}" for value in request.block_hashes[:9]]


def test_in_vllm_s_format_a_request_with_an_adapter_goes_without_the_pool(
    plain_half: SchedulerSide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, told once and counted: the keys cannot say what the adapter's weights are."""
    for request_id in ("r", "s"):
        request = request_with_adapter(tmp_path, request_id)
        plain_half.on_new_request(request)
        assert plain_half.match(request, 0) == (0, False)
        assert prefix_of(plain_half, request) is None
    told = [record for record in caplog.records if "with an adapter" in record.getMessage()]
    assert len(told) == 1
    assert plain_half.take_counters()["unnamed_requests"] == 2


def test_after_a_reset_with_blocks_in_use_nothing_has_a_name_until_one_without(
    half: SchedulerSide, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has kept its own cache: KV cache of the old weights must not get the new name."""
    before, meanwhile, after = map(plain_request, ("before", "meanwhile", "after"))
    half.on_new_request(before)
    old = prefix_of(half, before)
    pool = half._tables.manager.block_pool
    pool.num_in_use = 1
    assert not half.reset()
    pool.num_in_use = 0
    half.on_new_request(meanwhile)
    assert half.match(meanwhile, 0) == (0, False)
    assert prefix_of(half, before) is None
    assert prefix_of(half, meanwhile) is None
    assert [r.levelname for r in caplog.records if "answers True" in r.getMessage()] == ["WARNING"]
    assert half.reset()
    half.on_new_request(after)
    assert prefix_of(half, after) not in (None, old)
    assert prefix_of(half, meanwhile) == prefix_of(half, after), "it has computed nothing yet"


def test_an_adapter_first_seen_after_a_failed_reset_has_a_name_after_the_next(
    half: SchedulerSide, digests: SlowDigests, tmp_path: Path
) -> None:
    """It is read meanwhile, although its request goes without the pool."""
    pool = half._tables.manager.block_pool
    pool.num_in_use = 1
    assert not half.reset()
    pool.num_in_use = 0
    digests.answer, digests.is_known = "digest", True
    request = request_with_adapter(tmp_path)
    half.on_new_request(request)
    assert half.match(request, 0) == (0, False)
    assert prefix_of(half, request) is None
    wait_for(lambda: half._names.namespace_of(request.lora_request) is not PENDING)
    assert half.reset()
    assert prefix_of(half, request) is not None


def test_in_vllm_s_format_a_reset_ends_the_use_of_the_pool(
    plain_half: SchedulerSide, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one name, and what is under it may be of the old weights; nothing is removed."""
    before, after = plain_request("before"), plain_request("after")
    plain_half.on_new_request(before)
    assert prefix_of(plain_half, before) is not None
    plain_half._tables.manager.block_pool.num_in_use = 1
    plain_half.reset()
    plain_half._tables.manager.block_pool.num_in_use = 0
    plain_half.reset()
    plain_half.on_new_request(after)
    assert prefix_of(plain_half, before) is None
    assert prefix_of(plain_half, after) is None
    assert plain_half.match(after, 0) == (0, False)
    assert [r.levelname for r in caplog.records if "was reset" in r.getMessage()] == ["WARNING"]
    counters = plain_half.take_counters()
    assert (counters["resets"], counters["unnamed_requests"]) == (2, 1)


def test_in_vllm_s_format_the_start_tells_what_the_keys_do_not_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The operator answers for it."""
    side(key_format="vllm").close()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    for words in ("'final'", "weights", "dtype", "checksum", "moving-from-vllm-mooncake"):
        assert words in record.getMessage()
