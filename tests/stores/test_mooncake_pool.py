"""The pool of one folder, with real processes: what starts, what is found out, what is ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError, StoreOpenError
from kvtide.stores import mooncake_checks, mooncake_pool
from kvtide.stores.mooncake_metrics import MasterMetrics
from kvtide.stores.mooncake_pool import LocalPool, PoolStatus
from kvtide.stores.mooncake_programs import PoolSettings, segment_name
from kvtide.stores.mooncake_state import PoolState, ProgramState
from kvtide.stores.ports import free_ports, listeners
from kvtide.stores.processes import ProcessId
from tests.stores.sockets import listen

pytestmark = pytest.mark.timeout(60)

SIZE = 16 << 20
RUNS, PAUSED, DEAD = ProgramState.RUNS, ProgramState.PAUSED, ProgramState.DEAD


@pytest.fixture
def given() -> dict[str, Any]:
    """Return settings that nothing on this machine is in the way of."""
    port, metrics_port = free_ports(2)
    return {"port": port, "metrics_port": metrics_port, "segment_bytes": SIZE}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    """Return a pool that has not been started; what runs of it in the end is killed."""
    pool = LocalPool(tmp_path / "pool")
    yield pool
    for process in processes(pool).values():
        process.kill()


def processes(pool: LocalPool) -> dict[str, ProcessId]:
    """Return the processes that the folder names."""
    try:
        state = PoolState.load(pool.folder)
    except ConfigError:
        return {}
    return {} if state is None else state.processes


def status(pool: LocalPool) -> PoolStatus:
    """Return the status of a pool that was started."""
    found = pool.status()
    assert found is not None
    return found


def test_a_pool_starts_shows_itself_and_ends(pool: LocalPool, given: dict[str, Any]) -> None:
    """Each of the three may be repeated."""
    assert pool.status() is None
    assert pool.down() == []
    assert not pool.folder.exists()

    assert pool.up(given).started == ["master", "owner"]
    assert status(pool).is_healthy()
    assert status(pool).programs == {"master": RUNS, "owner": RUNS}
    metrics = status(pool).metrics
    assert metrics is not None
    assert (metrics.capacity_bytes, metrics.used_bytes, metrics.num_keys) == (SIZE, 0, 0)
    assert status(pool).state.settings == replace(PoolSettings(), **given)
    started = processes(pool)
    for name, process in started.items():
        assert (pool.folder / f"{name}.pid").read_text() == f"{process.pid}\n"
        assert os.getsid(process.pid) == process.pid
        assert (pool.folder / f"{name}.log").stat().st_size > 0

    assert pool.up({}).started == []
    assert pool.up(given).started == []
    assert processes(pool) == started

    assert pool.down() == ["master", "owner"]
    assert not any(process.is_alive() for process in started.values())
    assert pool.status() is None
    assert pool.down() == []
    left = {path.name for path in pool.folder.iterdir()}
    assert left == {"lock", "master.log", "owner.log"}


def test_a_pool_that_runs_keeps_its_settings(pool: LocalPool, given: dict[str, Any]) -> None:
    """Others are refused, all of them at once, and the pool goes on as it was."""
    pool.up(given)
    started = processes(pool)
    with pytest.raises(ConfigError) as caught:
        pool.up(given | {"segment_bytes": 32 << 20, "lease_ms": 5})
    size, lease = caught.value.faults
    assert "--size 16MiB, not 32MiB: `kvtide pool down` first" in size
    assert "--lease-ms 10000, not 5" in lease
    assert processes(pool) == started
    assert status(pool).is_healthy()


@pytest.mark.parametrize("name", ["master", "owner"])
def test_what_has_died_is_started_again(pool: LocalPool, given: dict[str, Any], name: str) -> None:
    """The other process goes on, and the pool has the settings it had."""
    pool.up(given)
    before = processes(pool)
    before[name].kill()
    [fault] = status(pool).faults()
    assert fault.startswith(f"the {name} is dead (see {pool.folder}/{name}.log): `kvtide pool up`")
    assert not status(pool).is_healthy()
    with pytest.raises(ConfigError, match="not 32MiB"):
        pool.up({"segment_bytes": 32 << 20})

    assert pool.up({}).started == [name]
    assert status(pool).is_healthy()
    assert status(pool).state.settings == replace(PoolSettings(), **given)
    after = processes(pool)
    del before[name], after[name]
    assert before == after


def test_a_pool_that_is_dead_is_started_anew(pool: LocalPool, given: dict[str, Any]) -> None:
    """With the settings that are asked for now, and with fresh logs."""
    pool.up(given)
    before = processes(pool)
    for process in before.values():
        process.kill()
    assert status(pool).programs == {"master": DEAD, "owner": DEAD}
    [fault] = status(pool).faults()
    assert fault.startswith("both processes are gone")
    assert f"{pool.folder}/master.log and {pool.folder}/owner.log" in fault
    assert pool.up(given | {"segment_bytes": 32 << 20}).started == ["master", "owner"]
    assert status(pool).state.settings.segment_bytes == 32 << 20
    for name, process in before.items():
        assert f" {process.pid} " not in (pool.folder / f"{name}.log").read_text()


def test_what_is_left_of_a_pool_can_be_ended(pool: LocalPool, given: dict[str, Any]) -> None:
    """Whether one process has died, or one hangs."""
    pool.up(given)
    left = processes(pool)
    left["master"].kill()
    left["owner"].pause()
    assert pool.down() == ["owner"]
    assert not left["owner"].is_alive()
    assert pool.status() is None


def test_a_paused_program_is_told_and_not_waited_for(
    pool: LocalPool, given: dict[str, Any]
) -> None:
    """It hangs whoever asks it, so `up` refuses at once, with what to do."""
    pool.up(given)
    master = processes(pool)["master"]
    master.pause()
    assert status(pool).programs == {"master": PAUSED, "owner": RUNS}
    told = f"the master is paused: `kill -CONT {master.pid}` lets it go on"
    assert status(pool).faults() == [told]
    with pytest.raises(ConfigError, match="kill -CONT"):
        pool.up({})
    os.kill(master.pid, signal.SIGCONT)
    assert pool.up({}).started == []
    assert status(pool).is_healthy()


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_who_has_a_pid_of_the_pool_now_is_neither_believed_nor_ended(
    pool: LocalPool, change: dict[str, Any]
) -> None:
    """As after a restart of the machine."""
    bystander = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    now = ProcessId.of(bystander.pid)
    assert now is not None
    then = replace(now, **change)
    pool.folder.mkdir()
    PoolState(settings=PoolSettings(), master=then, owner=then, owner_port=1).save(pool.folder)
    assert status(pool).programs == {"master": DEAD, "owner": DEAD}
    assert status(pool).metrics is None
    assert pool.down() == []
    assert pool.status() is None
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    assert bystander.returncode == 0


def test_an_up_that_was_killed_half_way_is_finished_by_the_next(
    pool: LocalPool, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master was written down before anything else was done."""
    seen: list[PoolState | None] = []
    wait = mooncake_pool.wait_for_master

    def looked_at(*arguments: Any) -> MasterMetrics:
        seen.append(PoolState.load(pool.folder))
        return wait(*arguments)

    monkeypatch.setattr(mooncake_pool, "wait_for_master", looked_at)
    pool.up(given)
    [half_way] = seen
    assert half_way is not None
    assert half_way.programs() == {"master": RUNS, "owner": DEAD}
    processes(pool)["owner"].kill()
    half_way.save(pool.folder)
    assert pool.up({}).started == ["owner"]
    assert processes(pool)["master"] == half_way.master


# ---- what is refused


def test_every_fault_is_named_at_once(pool: LocalPool) -> None:
    """Each with its option; nothing is started, and nothing is left."""
    given = {
        "host": "192.0.2.77",
        "port": 70_000,
        "metrics_port": 0,
        "segment_bytes": 1 << 50,
        "lease_ms": -1,
    }
    with pytest.raises(ConfigError) as caught:
        pool.up(given)
    lease, host, port, metrics_port, size = caught.value.faults
    assert "-1 ms" in lease
    assert "--host 192.0.2.77 is no address of this machine: write 127.0.0.1" in host
    assert "--port 70000 is no port" in port
    assert "--metrics-port 0 is no port" in metrics_port
    assert "--size 1024TiB is more than the memory that is available here: choose at most" in size
    assert pool.status() is None


@pytest.mark.parametrize(
    "change,words",
    [
        ({"host": "localhost"}, "no IPv4 address: write 127.0.0.1"),
        ({"host": "::1"}, "no IPv4 address"),
        ({"host": "0.0.0.0"}, "no address that clients can connect to"),  # noqa: S104 - a case
        ({"segment_bytes": SIZE - 1}, "at least 16MiB"),
        ({"lease_ms": 10**9}, "a day"),
        ({"port": 5000, "metrics_port": 5000}, "both 5000"),
    ],
)
def test_a_fault_comes_with_its_remedy(
    pool: LocalPool, given: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    """One sentence for each."""
    with pytest.raises(ConfigError, match=words) as caught:
        pool.up(given | change)
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("name", ["port", "metrics_port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - a case
def test_a_port_in_use_names_its_holder(
    pool: LocalPool, given: dict[str, Any], name: str, host: str
) -> None:
    """By pid and command, whether it listens on this address or on all."""
    with closing(listen(host)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            pool.up(given | {name: port})
    [fault] = caught.value.faults
    option = "--" + name.replace("_", "-")
    assert fault.startswith(f"{option} {port} is in use by process {os.getpid()} (")
    assert "pytest" in fault
    assert fault.endswith("end it, or choose another port")


def test_a_port_that_somebody_holds_without_listening_is_in_use(
    pool: LocalPool, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who it is cannot be told, and the message says that."""
    monkeypatch.setattr(mooncake_checks, "is_free", lambda host, port: port != given["port"])
    with pytest.raises(ConfigError, match="in use by a process that cannot be told"):
        pool.up(given)


def test_two_pools_of_one_port_are_told_apart(
    pool: LocalPool, given: dict[str, Any], tmp_path: Path
) -> None:
    """The second says that the first one's master has it."""
    pool.up(given)
    with pytest.raises(ConfigError) as caught:
        LocalPool(tmp_path / "second").up(given)
    assert len(caught.value.faults) == 2
    master = processes(pool)["master"]
    assert f"process {master.pid} (mooncake_master" in caught.value.faults[0]


def test_a_folder_that_cannot_be_written_is_refused_with_the_rest(tmp_path: Path) -> None:
    """Nothing could be locked or written down there."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        LocalPool(tmp_path / "file" / "pool").up({"segment_bytes": 1})
    folder, size = caught.value.faults
    assert "cannot be written (Not a directory): choose another --folder" in folder
    assert "at least" in size


def a_file(**changes: object) -> str:
    """Return the file of a pool with some entries changed."""
    process = {"pid": 1, "start_ticks": 1, "boot_id": "x"} | changes.pop("process", {})  # type: ignore[operator]
    return json.dumps({"version": 1, "settings": {}, "master": process, "owner": None} | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1, "settings": {"x": 1}}',
        a_file(settings={"port": "abc"}),
        a_file(process={"pid": "x"}),
        a_file(process={"pid": -1}),
        a_file(process={"pid": 10**20}),
    ],
    ids=range(11),
)
def test_a_damaged_file_is_refused_with_the_remedy(pool: LocalPool, text: str) -> None:
    """By every command: processes might be lost sight of."""
    pool.folder.mkdir()
    (pool.folder / "pool.json").write_text(text)
    for command in (pool.status, pool.down, lambda: pool.up({})):
        with pytest.raises(ConfigError, match=r"pool.json cannot be read .* remove it"):
            command()


# ---- what fails while starting


def nothing_is_left(pool: LocalPool, given: dict[str, Any]) -> bool:
    """Whether neither a process nor a state is there."""
    return pool.status() is None and not listeners(given["port"])


def test_a_master_that_fails_is_quoted(pool: LocalPool, given: dict[str, Any]) -> None:
    """The message has the end of its log."""
    with pytest.raises(StoreOpenError, match="unknown command line flag 'no_such_flag'") as caught:
        pool.up(given | {"master_flags": {"no_such_flag": 1}})
    assert f"the last lines of {pool.folder}/master.log" in str(caught.value)
    assert nothing_is_left(pool, given)


def test_an_owner_that_fails_ends_the_master(
    pool: LocalPool, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a pool is none."""
    command = mooncake_pool.owner_command
    monkeypatch.setattr(
        mooncake_pool,
        "owner_command",
        lambda *arguments: [*command(*arguments), "-global_segment_size=1000"],
    )
    with pytest.raises(StoreOpenError, match="at least 16777216"):
        pool.up(given)
    assert nothing_is_left(pool, given)


def test_an_owner_that_fails_leaves_a_master_that_ran(
    pool: LocalPool, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before is not the failing command's to end."""
    pool.up(given)
    processes(pool)["owner"].kill()
    with monkeypatch.context() as patch:
        patch.setattr(mooncake_pool, "owner_command", lambda *_: ["/bin/false"])
        with pytest.raises(StoreOpenError, match="the owner of the pool's memory ended"):
            pool.up({})
    assert status(pool).programs == {"master": RUNS, "owner": DEAD}
    assert pool.up({}).started == ["owner"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_up_that_is_interrupted_ends_what_it_started(
    pool: LocalPool,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """As by Ctrl-C, or by being told to stop."""

    def interrupt(*_: Any) -> MasterMetrics:
        raise error

    monkeypatch.setattr(mooncake_pool, "wait_for_segment", interrupt)
    with pytest.raises(error):
        pool.up(given)
    assert nothing_is_left(pool, given)


@pytest.mark.parametrize("saves", [0, 1])
def test_a_state_that_cannot_be_written_leaves_nothing_running(
    pool: LocalPool, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    """A process that nobody knows of would stay for ever."""
    save, calls = PoolState.save, []

    def fail(state: PoolState, folder: Path) -> None:
        calls.append(state)
        if len(calls) > saves:
            raise OSError(28, "No space left on device")
        save(state, folder)

    monkeypatch.setattr(PoolState, "save", fail)
    with pytest.raises(StoreOpenError, match="No space left"):
        pool.up(given)
    assert nothing_is_left(pool, given)
    assert not any(process.is_alive() for state in calls for process in state.processes.values())


# ---- status, by itself


def shown(tmp_path: Path, programs: dict[str, ProgramState], metrics: Any) -> PoolStatus:
    """Return a status that is only looked at."""
    me = ProcessId.of(os.getpid())
    state = PoolState(settings=PoolSettings(), master=me, owner=me, owner_port=4711)
    return PoolStatus(folder=tmp_path, state=state, programs=programs, metrics=metrics)


def test_a_status_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    """What is dead or paused comes first: the rest follows from it."""
    page = 'master_total_capacity_bytes 1\nsegment_total_capacity_bytes{segment="%s"} 1\n'
    mounted = MasterMetrics.parse(page % segment_name(PoolSettings(), 4711))
    other = MasterMetrics.parse(page % segment_name(PoolSettings(), 4712))
    both = {"master": RUNS, "owner": RUNS}
    assert shown(tmp_path, both, mounted).is_healthy()
    [fault] = shown(tmp_path, both, other).faults()
    assert fault == "the master does not have the owner's memory yet: ask again in two seconds"
    [fault] = shown(tmp_path, both, None).faults()
    assert fault.startswith("the master does not answer (see ")
    assert fault.endswith("`kvtide pool down` ends it")
    faults = shown(tmp_path, {"master": PAUSED, "owner": DEAD}, None).faults()
    assert [fault.partition(" (")[0].partition(":")[0] for fault in faults] == [
        "the owner is dead",
        "the master is paused",
    ]


def test_the_state_is_what_was_saved(tmp_path: Path) -> None:
    """Whole, and readable for people and scripts."""
    me = ProcessId.of(os.getpid())
    settings = PoolSettings(port=1, lease_ms=2, master_flags={"client_ttl": 3})
    for state in (
        PoolState(settings=settings),
        PoolState(settings=settings, master=me, owner=me, owner_port=5),
    ):
        state.save(tmp_path)
        assert PoolState.load(tmp_path) == state
    data = json.loads((tmp_path / "pool.json").read_text())
    assert data["master"]["pid"] == os.getpid()
    assert data["settings"]["port"] == 1
    PoolState.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []
