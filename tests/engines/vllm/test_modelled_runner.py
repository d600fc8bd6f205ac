"""Every kind of group under vLLM's own scheduler and cache manager, with a model that is a hash.

Whatever vLLM makes a request read, from blocks it computed or kvtide loaded, is compared with what
must be there. Mamba 1, whose kernels this machine lacks, is among the kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtide.core.jobs import BoundaryJob
from tests.engines.vllm.modelled_runner import (
    ModelledEngine,
    Setup,
    attention,
    modelled_engine,
    state,
)

KINDS: dict[str, Callable[[], list[Any]]] = {
    "mamba1 and full": lambda: [state(32), attention("FullAttentionSpec", 32)],
    "mamba1 alone": lambda: [state(32)],
    "gated delta net, window and full": lambda: [
        state(32, "GDN_ATTN"),
        attention("SlidingWindowSpec", 32, sliding_window=70),
        attention("FullAttentionSpec", 32),
    ],
    "window and full of other blocks": lambda: [
        attention("SlidingWindowSpec", 16, sliding_window=40),
        attention("FullAttentionSpec", 32),
    ],
    "window alone": lambda: [attention("SlidingWindowSpec", 16, sliding_window=100)],
    "chunked local and full": lambda: [
        attention("ChunkedLocalAttentionSpec", 16, attention_chunk_size=64),
        attention("FullAttentionSpec", 16),
    ],
    "five groups as DeepSeek-V4 has them": lambda: [
        attention("FullAttentionSpec", 256),
        attention("SlidingWindowSpec", 64, sliding_window=128),
        attention("SlidingWindowSpec", 64, sliding_window=512),
        attention("SlidingWindowSpec", 4, sliding_window=16),
        attention("SlidingWindowSpec", 8, sliding_window=64),
    ],
}


def tokens(seed: int, count: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    random = Random(seed)
    return [random.randrange(900) for _ in range(count)]


def setup_of(kind: str, **changes: Any) -> Setup:
    """A setup whose budgets do not cut jobs."""
    options = {"pin_fraction": 0.5, **changes.pop("options", {})}
    return Setup(KINDS[kind](), options=options, **changes)


def run(engine: ModelledEngine, prompts: dict[str, list[int]], max_tokens: int = 4) -> None:
    """Run prompts one after the other, so that each finds what the one before left."""
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens)
        engine.run()
        engine.settle()


def loaded(engine: ModelledEngine) -> int:
    """How many tokens were loaded so far."""
    return int(engine.pool.counters["loaded_tokens"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_engine_loads_up_to_the_last_boundary(folder: Path, store: str, kind: str) -> None:
    """Prompts on and off the edges of blocks; every byte that is read is the right one."""
    lengths = (700, 641, 640, 512, 513, 320)
    prompts = {f"p{length}": tokens(length, length) for length in lengths}
    with modelled_engine(folder, store, setup_of(kind)) as cold:
        run(cold, prompts)
        outputs = dict(cold.outputs)
        unit = cold.pool.coordinator.lcm_block_size
        assert cold.pool.counters["saved_bytes"] > 0
        assert cold.pool.counters["loaded_tokens"] == 0
    with modelled_engine(folder, store, setup_of(kind)) as warm:
        for request_id, prompt in prompts.items():
            before = loaded(warm)
            run(warm, {request_id: prompt})
            assert loaded(warm) - before == (len(prompt) - 1) // unit * unit
        assert warm.outputs == outputs
        assert warm.num_checked > 0
        assert warm.pool.counters["failed_loads"] == 0


def test_a_partial_hit_resumes_at_the_last_hash_block(folder: Path, store: str) -> None:
    """Hashes of 8 tokens, blocks of 32: the state at the cut, and the chunk that it cuts."""
    prompts = {f"p{length}": tokens(length, length) for length in (100, 300, 129, 136, 128)}
    setup = setup_of("mamba1 and full", hash_unit=8)
    with modelled_engine(folder, store, setup) as cold:
        run(cold, prompts)
        assert cold.pool.coordinator.partial_hits
    with modelled_engine(folder, store, setup) as warm:
        for request_id, prompt in prompts.items():
            before = loaded(warm)
            run(warm, {request_id: prompt})
            assert loaded(warm) - before == (len(prompt) - 1) // 8 * 8
        longer = prompts["p300"] + tokens(1, 50)
        before = loaded(warm)
        run(warm, {"longer": longer})
        assert loaded(warm) - before == 0  # its own prefix cache holds it


@pytest.mark.parametrize("kind", ["mamba1 and full", "window and full of other blocks"])
@pytest.mark.parametrize("interval", [0, 128])
def test_sparse_retention_keeps_the_prompts_end(
    folder: Path, store: str, kind: str, interval: int
) -> None:
    """The same prompt resumes at its end; with an interval, a shorter one at a multiple of it."""
    prompt = tokens(5, 400)
    setup = setup_of(kind, retention_interval=interval)
    with modelled_engine(folder, store, setup) as cold:
        run(cold, {"whole": prompt})
    with modelled_engine(folder, store, setup) as warm:
        run(warm, {"whole": prompt})
        assert loaded(warm) == 384
    with modelled_engine(folder, store, setup) as warm:
        run(warm, {"shorter": prompt[:350] + tokens(6, 50)})
        assert loaded(warm) == (256 if interval else 0)


@pytest.mark.parametrize(
    "kind",
    ["mamba1 and full", "window and full of other blocks", "gated delta net, window and full"],
)
def test_a_prefix_that_several_prompts_share_is_found_from_the_third_on(
    folder: Path, store: str, kind: str
) -> None:
    """Retention keeps prompts' ends only; the second prompt leaves what resuming there needs."""
    shared = tokens(13, 333)
    setup = setup_of(kind, retention_interval=0)
    hits = []
    for seed in range(3):
        with modelled_engine(folder, store, setup) as fresh:
            run(fresh, {"p": shared + tokens(20 + seed, 150)})
            hits.append(loaded(fresh))
    assert hits == [0, 0, 320]


@pytest.mark.parametrize("kind", KINDS)
def test_under_pressure_every_byte_is_right(folder: Path, store: str, kind: str) -> None:
    """Shared prefixes, preemptions, loads and saves at once, in a cache that is too small."""
    random = Random(kind)
    base = tokens(7, 600)
    prompts = {
        f"p{i}": base[: random.randrange(600)] + tokens(100 + i, random.randrange(1, 200))
        for i in range(16)
    }
    # Enough for the largest request, not for the eight that run at once.
    sizes = {"five groups as DeepSeek-V4 has them": 130, "mamba1 alone": 10, "window alone": 36}
    small = sizes.get(kind, 52)
    num_preemptions = 0
    for seed in range(3):
        setup = setup_of(kind, num_blocks=small, options={"pin_fraction": 0.2})
        with modelled_engine(folder, store, setup) as engine:
            order = sorted(prompts, key=lambda name: Random(f"{name}/{seed}").random())
            for name in order:
                engine.add(name, prompts[name], max_tokens=40)
            engine.run()
            num_preemptions += engine.num_preemptions
            assert len(engine.outputs) == len(prompts)
            assert engine.pool.num_pinned_blocks == 0
            if seed:
                assert loaded(engine) > 0
    assert num_preemptions > 0


def test_decode_saves_states_and_attention_alike(folder: Path, store: str) -> None:
    """The next turn resumes behind the prompt, since both were saved there."""
    setup = setup_of("mamba1 and full", options={"save_decode_cache": True})
    prompt = tokens(8, 100)
    with modelled_engine(folder, store, setup) as cold:
        run(cold, {"turn": prompt}, max_tokens=101)
        answer = cold.outputs["turn"]
    with modelled_engine(folder, store, setup) as warm:
        run(warm, {"next": prompt + answer + tokens(9, 10)})
        assert loaded(warm) == 192


def test_a_request_that_ends_at_its_last_boundary_leaves_its_state(
    folder: Path, store: str
) -> None:
    """Aborted right there, vLLM hands the state off with the end; it is pinned and saved."""
    setup = setup_of("mamba1 and full", hash_unit=8)
    prompt = tokens(10, 108)
    with modelled_engine(folder, store, setup) as cold:
        cold.add("aborted", prompt)
        request = cold.scheduler.requests["aborted"]
        while request.num_computed_tokens < 104:
            cold.step()
        assert request.num_computed_tokens == 104
        cold.abort("aborted")
        assert cold.pool.has_pins
        cold.run()
    with modelled_engine(folder, store, setup) as warm:
        run(warm, {"again": prompt})
        assert loaded(warm) == 104


def test_states_are_read_from_hand_offs_alone(folder: Path, store: str) -> None:
    """No job names a block of a state group by position, and none names the null block."""
    setup = setup_of("mamba1 and full")
    with modelled_engine(folder, store, setup) as engine:
        run(engine, {"p": tokens(11, 500)})
        jobs = [job for plan in engine.plans for job in plan.stores]
    puts = [put for job in jobs if isinstance(job, BoundaryJob) for put in job.puts]
    # A step computes 128 tokens; vLLM cuts the last one at the prompt's last boundary.
    assert [put.end_token for put in puts] == [128, 256, 384, 480]
    assert all(put.group_id == 0 and put.block_id for put in puts)
    ranges = [job for job in jobs if not isinstance(job, BoundaryJob)]
    assert ranges
    assert all(job.block_ids[0] == b"" for job in ranges)


def test_the_check_finds_a_load_of_wrong_bytes(folder: Path, store: str) -> None:
    """The control: what is loaded is replaced by zeros, and the model notices."""
    setup = setup_of("mamba1 and full")
    with modelled_engine(folder, store, setup) as cold:
        run(cold, {"p": tokens(12, 300)})
    with modelled_engine(folder, store, setup) as warm, pytest.MonkeyPatch.context() as patch:
        blocks = type(warm.worker._worker_side._blocks)
        write = blocks.write

        def zeros(self: Any, group_id: int, block_ids: Any, data: Any) -> None:
            write(self, group_id, block_ids, data * 0)

        patch.setattr(blocks, "write", zeros)
        with pytest.raises(AssertionError, match=r"does not hold|wrong bytes"):
            run(warm, {"p": tokens(12, 300)})


EAGLE: dict[str, tuple[Callable[[], list[Any]], frozenset[int]]] = {
    "one group for both": (lambda: [attention("FullAttentionSpec", 32)], frozenset({0})),
    "full and draft": (
        lambda: [attention("FullAttentionSpec", 64), attention("FullAttentionSpec", 32)],
        frozenset({1}),
    ),
    "window and draft": (
        lambda: [
            attention("FullAttentionSpec", 64),
            attention("SlidingWindowSpec", 16, sliding_window=50),
        ],
        frozenset({1}),
    ),
    "states and draft": (
        lambda: [state(32), attention("FullAttentionSpec", 32)],
        frozenset({1}),
    ),
}


@pytest.mark.parametrize("kind", EAGLE)
def test_a_draft_models_group_is_loaded_only_with_its_proof(
    folder: Path, store: str, kind: str
) -> None:
    """What the drafter wrote with knowledge of the next token is what the next request needs."""
    specs, drafts = EAGLE[kind]
    setup = Setup(specs(), draft_groups=drafts, options={"pin_fraction": 0.5})
    prompts = {f"p{length}": tokens(length, length) for length in (700, 641, 640, 512, 320)}
    with modelled_engine(folder, store, setup) as cold:
        run(cold, prompts)
        outputs = dict(cold.outputs)
    with modelled_engine(folder, store, setup) as warm:
        coordinator = warm.pool.coordinator
        unit, proof = coordinator.lcm_block_size, coordinator.max_proof_tokens
        assert proof in (16, 32)
        for request_id, prompt in prompts.items():
            before = loaded(warm)
            run(warm, {request_id: prompt})
            last = len(prompt) // proof * proof - proof
            assert loaded(warm) - before == min(last, len(prompt) - 1) // unit * unit
        assert warm.outputs == outputs


def test_the_proof_of_a_first_job_is_saved_in_a_later_step(folder: Path, store: str) -> None:
    """One job ends at 32 in the first step; its proof, 32 to 48, is computed in the second."""
    setup = Setup(
        [attention("FullAttentionSpec", 16), attention("FullAttentionSpec", 32)],
        draft_groups=frozenset({0}),
        max_num_batched_tokens=40,
        options={"pin_fraction": 0.5},
    )
    for hit in (0, 32):
        with modelled_engine(folder, store, setup) as engine:
            run(engine, {"p": tokens(1, 60)}, max_tokens=1)
            assert loaded(engine) == hit


def test_two_loads_that_end_inside_a_block_do_not_hold_each_other_up(
    folder: Path, store: str
) -> None:
    """Each load's state needs a block more than vLLM reserved; without kvtide 5 blocks do."""
    specs = [state(16), attention("FullAttentionSpec", 16)]
    prompts = {f"p{i}": tokens(i, 26) for i in range(2)}
    options = {"pin_fraction": 0.5}
    with modelled_engine(folder, store, Setup(specs, hash_unit=8, options=options)) as cold:
        run(cold, prompts, max_tokens=1)
    with modelled_engine(
        folder, store, Setup(specs, hash_unit=8, num_blocks=7, options=options)
    ) as warm:
        for name, prompt in prompts.items():
            warm.add(name, prompt, 1)
        warm.run(timeout_s=10.0)
        assert loaded(warm) > 0
