"""A real engine on a Mooncake pool whose master or owner dies or hangs: it answers as without one.

One engine and one pool go through all of it. Each test saves a prompt, breaks the pool, asks for
that prompt and for a new one, mends the pool, and sees saving and loading resume by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores import Status, open_store
from kvtide.stores.mooncake_client import MooncakeClient
from kvtide.testing import Arena, value_of
from kvtide.testing.mooncake import MooncakePool
from tests.engines.vllm.engines import BLOCK, InProcessEngine, engine, prompt_of
from tests.stores.mooncake_pools import RawClient

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPT_TOKENS = 400
WHOLE = PROMPT_TOKENS // BLOCK * BLOCK
NUM_PROMPTS = 16
POOL_BYTES = 64 << 20
LEASE_MS = 300
AT_ONCE_S = 8.0
"""An answer takes 0.2 s, on a busy machine more; a call that hangs takes 30 s."""
LOAD_TIMEOUT_S = 1.5
"""Less than a transfer may take, so that it is kvtide that gives up first."""
OPTIONS = {
    "load_timeout_s": LOAD_TIMEOUT_S,
    "save_timeout_s": 4.0,
    "backoff_s": 0.1,
    "max_backoff_s": 0.2,
    "max_load_backoff_s": 0.2,
}

Prompt = tuple[list[int], list[int]]
"""A prompt, and what an engine without kvtide answers to it."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An engine, the pool that is broken under it, and prompts that nobody has asked yet."""

    one: InProcessEngine
    pool: MooncakePool
    prompts: Iterator[Prompt]

    def ask(self, prompt: Prompt) -> int:
        """Answer a prompt as without kvtide, and soon; return how much of it was loaded."""
        tokens, want = prompt
        begun_s = time.monotonic()
        [output] = self.one.run(tokens)
        assert time.monotonic() - begun_s < LOAD_TIMEOUT_S + AT_ONCE_S
        assert list(output.outputs[0].token_ids) == want
        return int(output.num_cached_tokens)

    def forget(self) -> None:
        """Let all jobs end, which is a matter of their deadlines, and leave only the pool."""
        self.one.settle()
        self.one.forget_local()

    def saved(self) -> Prompt:
        """Return a prompt that only the pool holds."""
        prompt = next(self.prompts)
        saved_bytes = self.counted("saved_bytes")
        assert self.ask(prompt) == 0
        self.forget()
        assert saved_bytes() > 0
        return prompt

    def assert_resumes(self, prompt: Prompt, limit_s: float = 30.0) -> None:
        """See a prompt that was not saved be saved and loaded, with no help."""
        give_up_s = time.monotonic() + limit_s
        while self.ask(prompt) != WHOLE:
            assert time.monotonic() < give_up_s, f"never resumed: {self.one.counters}"
            self.forget()
        self.forget()
        self.one.pool.check_integrity()
        self.one.worker.check_idle()

    def counted(self, name: str) -> Callable[[], int]:
        """Return what tells by how much a counter has grown from now on."""
        before = self.one.counters[name]
        return lambda: self.one.counters[name] - before


@pytest.fixture(scope="module")
def answers(model: Path) -> list[Prompt]:
    """Prompts, and what an engine without kvtide answers to them."""
    prompts = [prompt_of(PROMPT_TOKENS, seed=2000 + number) for number in range(NUM_PROMPTS)]
    with engine(model, None) as plain:
        return [(prompt, plain.generate(prompt)[0]) for prompt in prompts]


@pytest.fixture(scope="module")
def broken(model: Path, answers: list[Prompt]) -> Iterator[Broken]:
    """An engine on a pool that is soon to be broken, which gives up a silent owner after 2 s."""
    with (
        MooncakePool(
            segment_bytes=POOL_BYTES, lease_ms=LEASE_MS, master_flags={"client_ttl": 2}
        ) as pool,
        engine(model, pool.url, options=OPTIONS) as one,
    ):
        yield Broken(one, pool, iter(answers))


@contextmanager
def broken_by(do: Callable[[], None], undo: Callable[[], None]) -> Iterator[None]:
    """Break something for as long as a ``with`` lasts."""
    do()
    try:
        yield
    finally:
        undo()


def test_with_the_master_gone_every_call_is_a_miss_at_once(broken: Broken) -> None:
    """One call finds out, no other is made; a new master is found without a restart."""
    known, new = broken.saved(), next(broken.prompts)
    outages, refused = broken.counted("store_outages"), broken.counted("refused_store_calls")
    errors = broken.counted("lookup_errors")
    with broken_by(broken.pool.kill_master, broken.pool.start_master):
        for prompt in (known, new, known, new):
            assert broken.ask(prompt) == 0
            broken.forget()
        assert outages() == 1
        assert errors() >= 4
        assert refused() >= 4 + 2
    broken.assert_resumes(new)


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_master_that_dies_during_loads_and_saves_costs_recomputation_only(
    broken: Broken, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed under a call while two requests run, of which one loads and one saves."""
    known, new = broken.saved(), next(broken.prompts)
    outages, failed = broken.counted("store_outages"), broken.counted("failed_loads")
    native: Callable[..., Any] = getattr(MooncakeClient, call)
    calls = count()

    def killing(client: MooncakeClient, batch: Any) -> Any:
        if next(calls) == 0:
            broken.pool.kill_master()
        return native(client, batch)

    monkeypatch.setattr(MooncakeClient, call, killing)
    with broken_by(lambda: None, broken.pool.start_master):
        outputs = broken.one.run(known[0], new[0])
        assert [list(output.outputs[0].token_ids) for output in outputs] == [known[1], new[1]]
        broken.forget()
        assert next(calls) > 0
        assert outages() == 1
        assert failed() == 1 or (call == "put" and not failed())
    broken.assert_resumes(new)


def test_with_the_owner_gone_promised_hits_fail_and_are_recomputed(broken: Broken) -> None:
    """The master does not know yet, and promises what the owner held: one load, one failure."""
    known, new = broken.saved(), next(broken.prompts)
    failed, jobs = broken.counted("failed_loads"), broken.counted("load_jobs")
    outages = broken.counted("store_outages")
    with broken_by(broken.pool.kill_owner, broken.pool.start_owner):
        assert broken.ask(known) == 0
        assert failed() == jobs() == 1
        assert broken.ask(new) == 0
        broken.forget()
    broken.assert_resumes(known)
    broken.assert_resumes(new)
    assert outages() == 0, "the pool was never lost"


def test_a_load_from_an_owner_that_hangs_ends_at_its_timeout(broken: Broken) -> None:
    """Mooncake gives the transfer up later; nobody waits for that, and it harms no one."""
    known, new = broken.saved(), next(broken.prompts)
    expired, failed = broken.counted("expired_loads"), broken.counted("failed_loads")
    with broken_by(broken.pool.pause_owner, broken.pool.resume_owner):
        begun_s = time.monotonic()
        assert broken.ask(known) == 0
        assert time.monotonic() - begun_s >= LOAD_TIMEOUT_S
        assert expired() == failed() == 1
        assert broken.ask(new) == 0
        broken.forget()
    broken.assert_resumes(new)


def test_with_a_master_that_hangs_lookups_are_misses_after_their_wait(broken: Broken) -> None:
    """One call waits for it; then it is lost, until it answers a probe."""
    known, new = broken.saved(), next(broken.prompts)
    outages, timed_out = broken.counted("store_outages"), broken.counted("lookups_timed_out")
    late = broken.counted("lookup_waits_expired")
    with broken_by(broken.pool.pause_master, broken.pool.resume_master):
        assert broken.ask(known) == 0
        assert broken.ask(new) == 0
        assert late() + timed_out() >= 1
        broken.forget()
        assert outages() == 1
    broken.assert_resumes(new)


def test_a_pool_without_room_costs_no_request_and_is_used_again_when_it_has(
    broken: Broken,
) -> None:
    """All of it is taken by values that nobody may evict; then they go."""
    new, refused = next(broken.prompts), broken.counted("no_space_jobs")
    with closing(RawClient(broken.pool)) as raw:
        raw.clear(taken_bytes=POOL_BYTES)
        assert broken.ask(new) == 0
        broken.forget()
        assert refused() > 0
        raw.clear()
    broken.assert_resumes(new)


def test_a_value_that_somebody_replaced_is_a_miss_and_is_mended(broken: Broken) -> None:
    """Other bytes under a key do not verify: the tokens are computed, and stored again."""
    prompt, bad = broken.saved(), broken.counted("bad_values")
    chunk = 5
    key, num_bytes = value_of_chunk(broken.one, prompt[0], chunk)
    with closing(open_store(broken.pool.url)) as store:
        time.sleep(2 * LEASE_MS / 1000)
        assert store.remove([key]) == [Status.OK]
        assert Arena(store).put([(key, value_of("other", num_bytes))]) == [Status.OK]
    assert broken.ask(prompt) == chunk * BLOCK
    assert bad() == 1
    broken.forget()
    broken.assert_resumes(prompt)


def value_of_chunk(one: InProcessEngine, prompt: list[int], chunk: int) -> tuple[str, int]:
    """Return the key of a chunk's value and its length in bytes."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request(
        request_id="keys",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=one.core.request_block_hasher,
    )
    side = one.connector._scheduler_side
    [[database]] = side._plan.coordinator().databases(side._namespace_of(request))
    payload_bytes = one.worker._memory.layout.groups[0].payload_bytes
    return database.key_for(request.block_hashes[chunk]), payload_bytes + TAG_BYTES
