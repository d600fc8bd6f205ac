"""Random histories of one or two scripted engines over a store that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.core.admission import AdmissionLimits
from kvtide.core.save_limits import SavePolicy
from kvtide.runtime.limits import WorkerLimits
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Fault, FaultKind, FaultyStore
from kvtide.testing.blocks import FakeBlocks
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_checks import check_engine, check_idle, check_store
from kvtide.testing.engine_setup import EngineSetup, HookOrder, ManualClock
from kvtide.testing.interrupts import InterruptedStore
from tests.engine_models import DIVISIONS, MODELS, Division, Model, best_hit

IDS = ["a", "b", "c", "d", "e"]
FAULTS = [
    (FaultKind.LOST, "exists"),
    (FaultKind.LOST, "put"),
    (FaultKind.LOST, "get"),
    (FaultKind.LOST, "remove"),
    (FaultKind.FAILED, "exists"),
    (FaultKind.FAILED, "put"),
    (FaultKind.FAILED, "get"),
    (FaultKind.FAILED, "remove"),
    (FaultKind.NO_SPACE, "put"),
    (FaultKind.VANISHED, "exists"),
    (FaultKind.VANISHED, "get"),
    (FaultKind.SHORT, "get"),
    (FaultKind.FLIPPED, "get"),
]
READ_FAULTS = [(kind, method) for kind, method in FAULTS if method in ("get", "remove")]
EVENTS = ["step", "late", "abort"]
SAVES = [SavePolicy(True, True), SavePolicy(True, False), SavePolicy(False, True)]


def some_keys(part: int) -> Callable[[str], bool]:
    """A third of all keys; which, depends on their last digits."""
    return lambda key: int(key[-4:], 16) % 3 == part


def engine_setup(model: Model, **how: Any) -> EngineSetup:
    """The setup of an engine that runs a model."""
    return model.setup(**how)


setups = st.builds(
    engine_setup,
    retention_units=st.sampled_from([None, None, 0, 2]),
    num_blocks=st.sampled_from([16, 20, 32, 96]),
    model=st.sampled_from(list(MODELS.values())),
    max_tokens_per_step=st.sampled_from([3, 7, 16, 64]),
    max_running=st.sampled_from([1, 2, 8]),
    num_drafts=st.sampled_from([0, 0, 3]),
    order=st.sampled_from(HookOrder),
    tell_preemptions=st.booleans(),
    report_delay=st.sampled_from([0, 0, 1, 2]),
    grant_limit=st.sampled_from([None, None, 8]),
    max_pinned_blocks=st.sampled_from([None, 1, 4]),
    max_job_tokens=st.sampled_from([None, 8]),
    decode_job_tokens=st.sampled_from([0, 8, 24]),
    admission=st.sampled_from(
        [
            AdmissionLimits(),
            AdmissionLimits(max_loads=1),
            AdmissionLimits(max_load_tokens=16, result_ttl_s=0.5),
        ]
    ),
    saves=st.sampled_from(SAVES),
    worker=st.sampled_from(
        [
            WorkerLimits(staging_bytes=256 << 10, load_staging_bytes=64 << 10, stage_wait_s=0.0),
            WorkerLimits(
                staging_bytes=16 << 10,
                load_staging_bytes=8 << 10,
                stage_wait_s=0.0,
                max_queued_puts=2,
                max_queued_loads=1,
                max_batch_keys=3,
                max_bad_keys=4,
            ),
        ]
    ),
)


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens, no request ever computes on a wrong byte, and nothing is left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[ScriptedEngine] = []
        self.prompts: dict[tuple[int, str], tuple[list[int], int]] = {}
        self.all_prompts: list[list[int]] = []
        self.weights = 0
        self.num_resets = 0

    @initialize(
        setup=setups,
        division=st.sampled_from(list(DIVISIONS.values())),
        num_engines=st.sampled_from([1, 1, 2]),
        capacity=st.sampled_from([1 << 30, 1 << 30, 600]),
    )
    def start(
        self, setup: EngineSetup, division: Division, num_engines: int, capacity: int
    ) -> None:
        """Any configuration; replicas share model, weights and store, not the number of ranks."""
        self.clock = ManualClock()
        self.memory = MemoryStore(capacity)
        self.faulty = FaultyStore(self.memory)
        self.store = InterruptedStore(self.faulty)
        self.engines = [
            ScriptedEngine(self.store, division.apply(setup, number), clock=self.clock)
            for number in range(num_engines)
        ]
        self.capacity = capacity
        for engine in self.engines:
            for rank in engine.ranks.ranks:
                self.let_copies_be_interrupted(rank.blocks)
        self.add(0, "a", 0, 16, 5, 0, False, 2, may_load=True)  # so that there is what to load
        self.work(0)

    def let_copies_be_interrupted(self, blocks: FakeBlocks) -> None:
        """Things happen while blocks are copied, too."""
        read, write = blocks.read, blocks.write

        def interrupted_read(*what: Any) -> None:
            self.store.interrupt_now("copy")
            read(*what)
            self.store.interrupt_now("copy")

        def interrupted_write(*what: Any) -> None:
            self.store.interrupt_now("copy")
            write(*what)
            self.store.interrupt_now("copy")

        blocks.read = interrupted_read  # type: ignore[method-assign]
        blocks.write = interrupted_write  # type: ignore[method-assign]

    def engine(self, index: int) -> ScriptedEngine:
        """One of the engines."""
        return self.engines[index % len(self.engines)]

    # ------------------------------------------------------------------ what users do

    @rule(
        index=st.integers(0, 1),
        request_id=st.sampled_from(IDS),
        family=st.integers(0, 1),
        shared=st.sampled_from([4, 9, 16, 16, 24]),
        length=st.integers(1, 9),
        tail=st.integers(0, 1),
        is_cold=st.booleans(),
        max_tokens=st.sampled_from([1, 2, 9]),
        may_load=st.sampled_from([True, True, True, False]),
        accepts=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    )
    def add(
        self,
        index: int,
        request_id: str,
        family: int,
        shared: int,
        length: int,
        tail: int,
        is_cold: bool,
        max_tokens: int,
        **how: Any,
    ) -> None:
        """Prompts share beginnings; ids are used again as soon as they are free."""
        engine = self.engine(index)
        if request_id in engine.requests:
            return
        if is_cold:
            engine.pool.drop_cached()
        prompt = [*range(family * 100, family * 100 + shared), *[50 + tail] * length]
        while not engine.batch.can_ever_fit(len(prompt) + max_tokens + engine.setup.num_drafts):
            prompt.pop()
        self.all_prompts.append(prompt)
        self.prompts[index % len(self.engines), request_id] = (prompt, max_tokens)
        engine.add(request_id, prompt, max_tokens=max_tokens, **how)

    @precondition(lambda self: self.all_prompts)
    @rule(
        index=st.integers(0, 1),
        request_id=st.sampled_from(IDS),
        which=st.integers(0, 100),
        more=st.lists(st.just(7), max_size=5),
        runs=st.lists(st.booleans(), max_size=5),
        trouble=st.one_of(
            st.none(),
            st.tuples(st.sampled_from(READ_FAULTS), st.sampled_from([None, 0, 1, 2])),
            st.tuples(st.sampled_from(EVENTS), st.sampled_from(["get", "copy"])),
        ),
    )
    def add_again(
        self,
        index: int,
        request_id: str,
        which: int,
        more: list[int],
        runs: list[bool],
        trouble: tuple[Any, Any] | None,
    ) -> None:
        """A conversation goes on after its blocks were used by others; loading meets trouble."""
        engine = self.engine(index)
        prompt = self.all_prompts[which % len(self.all_prompts)] + more
        fits = engine.batch.can_ever_fit(len(prompt) + 2 + engine.setup.num_drafts)
        if request_id in engine.requests or not fits:
            return
        self.work(index)
        engine.pool.drop_cached()
        if trouble in ((kind, part) for kind in EVENTS for part in ("get", "copy")):
            self.interrupt(trouble[0], trouble[1], index)
        elif trouble is not None:
            self.fail([trouble])
        self.prompts[index % len(self.engines), request_id] = (prompt, 2)
        engine.add(request_id, prompt, max_tokens=2)
        self.step(index, runs)

    @rule(index=st.integers(0, 1), family=st.integers(0, 1), num_steps=st.integers(0, 12))
    def add_many(self, index: int, family: int, num_steps: int) -> None:
        """More than the cache may hold: they push each other out while they decode."""
        for number, request_id in enumerate(IDS[:3]):
            self.add(index, request_id, family, 4, 5, number, False, 9, may_load=True, accepts=[1])
        self.step(index, [True] * num_steps)

    @rule(index=st.integers(0, 1), request_id=st.sampled_from(IDS))
    def abort(self, index: int, request_id: str) -> None:
        """At any moment, also while a load is under way."""
        engine = self.engine(index)
        request = engine.requests.get(request_id)
        if request is not None and request.state.value != "finished":
            engine.abort(request_id)

    # ------------------------------------------------------------------ what the engine does

    @rule(index=st.integers(0, 1), runs=st.lists(st.sampled_from([True, True, False]), max_size=6))
    def step(self, index: int, runs: list[bool]) -> None:
        """With the pool's threads quick, or starved."""
        for run_pool in runs:
            self.engine(index).step(run_pool=run_pool)

    @rule(index=st.integers(0, 1))
    def work(self, index: int) -> None:
        """A long time in which nobody comes or goes."""
        for _ in range(20):
            if self.engine(index).has_work:
                self.engine(index).step()

    @rule(index=st.integers(0, 1), chance=st.integers(0, 4))
    def reset_pool(self, index: int, chance: int) -> None:
        """The operator leaves the pool's contents behind, and the weights stay."""
        if chance != 3:
            return
        self.num_resets += 1
        self.engine(index).reset_pool(f"reset-{self.num_resets}")

    @rule(chance=st.integers(0, 4))
    def change_weights(self, chance: int) -> None:
        """All replicas, as soon as nothing is in the way."""
        if chance != 3:
            return
        for engine in self.engines:
            if engine.scheduler.has_pins or any(
                request.state.value in ("loading", "finished") or request.held_blocks
                for request in engine.requests.values()
                if request.state.value != "running"
            ):
                return
        self.weights += 1
        for engine in self.engines:
            engine.change_weights(self.weights)
        self.prompts.clear()

    # ------------------------------------------------------------------ what the pool does

    @rule(index=st.integers(0, 1), rank=st.integers(0, 3), part=st.integers(0, 3))
    def run_part(self, index: int, rank: int, part: int) -> None:
        """One of the pool's threads gets a turn."""
        engine = self.engine(index)
        ranks = engine.ranks.ranks
        worker = ranks[rank % len(ranks)].worker
        runs = [engine.run_lookups, worker.staging.run_pending]
        runs += [worker.sender.run_pending, worker.receiver.run_pending]
        runs[part]()

    # ------------------------------------------------------------------ what goes wrong

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.6, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; waits, back-offs and deadlines end."""
        self.clock.now_s += seconds

    @rule(
        faults=st.lists(
            st.tuples(st.sampled_from(FAULTS), st.sampled_from([None, 0, 1, 2])), max_size=3
        )
    )
    def fail(self, faults: list[tuple[tuple[FaultKind, str], int | None]]) -> None:
        """The store fails from now on, for all keys or some of them (or not at all)."""
        self.faulty.script = tuple(
            Fault(kind, method, keys=None if part is None else some_keys(part))
            for (kind, method), part in faults
        )

    @rule(part=st.integers(0, 2))
    def evict(self, part: int) -> None:
        """The store drops values that some lookup may just have seen."""
        self.memory.remove([key for key in list(self.memory._values) if some_keys(part)(key)])

    @rule(
        kind=st.sampled_from(["none", *EVENTS]),
        method=st.sampled_from(["exists", "put", "get", "copy"]),
        index=st.integers(0, 1),
    )
    def interrupt(self, kind: str, method: str, index: int) -> None:
        """While a call is under way the engine goes on, or the call's deadline passes."""
        engine = self.engine(index)
        is_inside = False

        def happen(called: str) -> None:
            nonlocal is_inside
            if called != method or is_inside:
                return
            is_inside = True
            if kind == "late":
                self.clock.now_s += 40.0
                for rank in engine.ranks.ranks:
                    rank.worker.expire(self.clock())
            elif kind == "step" and not engine.is_in_step:
                engine.step(run_pool=False)
            elif kind == "abort" and not engine.is_in_step:
                for request_id in list(engine.requests):
                    self.abort(index, request_id)
                engine.step(run_pool=False)
            is_inside = False

        self.store.interrupt = None if kind == "none" else happen

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def is_sound(self) -> None:
        """References, budgets, every cached byte, every byte computed on, every answer."""
        for number, engine in enumerate(self.engines):
            check_engine(engine)
            for request_id, output in engine.outputs.items():
                known = self.prompts.get((number, request_id))
                if known is not None:
                    prompt, max_tokens = known
                    assert output == engine.model.generate(prompt, max_tokens)
            engine.outputs.clear()

    @precondition(lambda self: self.engines)
    @rule()
    def stored_values_are_right(self) -> None:
        """Every value in the store is what its key says."""
        for engine in self.engines:
            check_store(engine, self.memory)

    def teardown(self) -> None:
        """Healed and drained, nothing is left; and what is saved then can be found and loaded."""
        if not self.engines:
            return
        self.faulty.script = ()
        self.store.interrupt = None
        for engine in self.engines:
            self.drain(engine)
            check_idle(engine)
            check_store(engine, self.memory)
        self.repeat_prompts()
        for engine in self.engines:
            engine.close()

    def drain(self, engine: ScriptedEngine) -> None:
        """Run until every request has ended and every job has been reported."""
        engine.run()
        for _ in range(10):
            self.clock.now_s += 5.0
            engine.step()
        self.is_sound()

    def repeat_prompts(self) -> None:
        """A prompt that was computed in health is loaded up to its last full block the next time.

        The first time may be the probe that ends a back-off of the pool, which saves one job.
        """
        engine = self.engines[0]
        setup = engine.setup
        is_cut = setup.max_pinned_blocks or setup.max_job_tokens or setup.grant_limit
        is_small = setup.worker.max_queued_puts == 2 or self.capacity < 1 << 30
        if is_cut or is_small or not setup.saves.prefill or setup.admission.max_load_tokens == 16:
            return
        for prompt in self.all_prompts:
            for number in range(3):
                engine.pool.drop_cached()
                request = engine.add("again", prompt)
                self.drain(engine)
                if number == 2:
                    wanted = best_hit(setup, len(prompt))
                    assert request.num_loaded_tokens == wanted
