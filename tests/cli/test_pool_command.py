"""``kvtide pool`` as a user meets it: what is printed where, exit codes, and real processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtide.cli import cli
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.stores.mooncake_state import PoolState
from kvtide.stores.ports import free_ports

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the default folder, in a cache of its own; what runs of it in the end is killed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kvtide" / "pool"
    yield folder
    state = PoolState.load(folder)
    for process in state.processes.values() if state is not None else ():
        process.kill()


@pytest.fixture
def options() -> list[str]:
    """Return options with which a pool starts here."""
    port, metrics_port = free_ports(2)
    return ["--size", "16MiB", "--port", str(port), "--metrics-port", str(metrics_port)]


def pool(*arguments: str) -> Result:
    """Run ``kvtide pool`` to its end; an error of ours is raised, as ``main`` expects it."""
    return CliRunner().invoke(cli, ["pool", *arguments])


def test_a_pool_from_up_to_down(folder: Path, options: list[str]) -> None:
    """`up` prints the URL and nothing else on stdout, so that a script can take it."""
    started = pool("up", *options)
    assert started.exit_code == 0
    assert started.stdout == f"mooncake://127.0.0.1:{options[3]}\n"
    assert started.stderr == f"started a pool of 16MiB, with its logs in {folder}\n"

    again = pool("up")
    assert (again.exit_code, again.stdout) == (0, started.stdout)
    assert again.stderr.startswith("it runs already: a pool of 16MiB")

    shown = pool("status")
    assert shown.exit_code == 0
    assert "16MiB" in shown.stdout
    assert started.stdout.strip() in shown.stdout
    assert shown.stderr == ""

    ended = pool("down")
    assert (ended.exit_code, ended.stdout) == (0, "ended the master and the owner\n")
    again = pool("down")
    assert (again.exit_code, again.stdout) == (0, f"no pool of {folder} ran\n")


def test_status_counts_what_clients_do(folder: Path, options: list[str]) -> None:
    """As the master counts it, in the table and as JSON."""
    url = pool("up", *options).stdout.strip()
    client = mooncake_module().MooncakeDistributedStore()
    address = url.removeprefix("mooncake://")
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address) == 0
    assert client.put("key", b"x" * (4 << 20)) == 0
    assert len(client.get("key")) == 4 << 20
    assert client.is_exist("none") == 0
    shown, as_json = pool("status"), pool("status", "--json")
    client.close()
    rows = dict(
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in shown.stdout.splitlines()
        if line.startswith("│")
    )
    assert rows["store"] == url
    assert rows["used"] == "4MiB (25%)"
    assert (rows["keys"], rows["keys written"], rows["keys checked"]) == ("1", "1", "1")
    assert rows["keys read, of these found"] == "1, 1 (100%)"
    assert rows["writes without room"] == "0"
    assert len(as_json.stdout.splitlines()) == 1
    found = json.loads(as_json.stdout)
    assert (found["faults"], found["url"], found["folder"]) == ([], url, str(folder))
    assert found["settings"]["segment_bytes"] == 16 << 20
    assert found["metrics"]["num_hits"] == 1
    assert found["master"]["state"] == "runs"
    assert found["owner"]["pid"] == int((folder / "owner.pid").read_text())
    assert found["owner"]["log"] == str(folder / "owner.log")


def test_status_exits_with_1_where_the_pool_cannot_be_used(
    folder: Path, options: list[str]
) -> None:
    """It says why on stderr, and in the JSON; `up` mends it."""
    for nothing in (pool("status"), pool("status", "--json")):
        assert nothing.exit_code == 1
    assert "`kvtide pool up` starts one" in pool("status").stderr
    assert json.loads(nothing.stdout)["url"] is None

    pool("up", *options)
    state = PoolState.load(folder)
    assert state is not None
    state.processes["master"].kill()
    shown = pool("status")
    assert shown.exit_code == 1
    assert "│ master  │" in shown.stdout
    assert "error: the master is dead" in shown.stderr
    found = json.loads(pool("status", "--json").stdout)
    assert len(found["faults"]) == 1
    assert found["metrics"] is None

    mended = pool("up")
    assert mended.exit_code == 0
    assert mended.stderr.startswith("started the master again")
    assert pool("status").exit_code == 0


def run(*arguments: str) -> "subprocess.Popen[str]":
    """Start the command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvtide", "pool", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_ups_at_once_one_starts_the_pool(folder: Path, options: list[str]) -> None:
    """The other waits for it and says that it runs; both end well."""
    both = [run("up", *options) for _ in range(2)]
    said = sorted(process.communicate(timeout=30)[1].partition(" a pool")[0] for process in both)
    assert said == ["it runs already:", "started"]
    assert [process.returncode for process in both] == [0, 0]


def test_an_error_is_one_message_and_exit_code_1(folder: Path, options: list[str]) -> None:
    """Every fault at once, on stderr."""
    process = run("up", *options, "--host", "192.0.2.77", "--size", "1MiB")
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (1, "")
    assert stderr.startswith("error: 2 settings are wrong:\n  1. --host")
    assert "\n  2. --size 1MiB is too small" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--size", "5 parsecs"], "no known unit"),
        (["--size", "5G"], "write 5GiB or 5GB"),
        (["--port", "x"], "not a valid integer"),
    ],
)
def test_what_cannot_be_read_is_refused(folder: Path, arguments: list[str], words: str) -> None:
    """As a fault of usage, with the option's name."""
    result = pool("up", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert words in result.stderr
    assert not folder.exists()


def test_a_pool_may_have_a_folder_of_its_own(
    folder: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command finds it there, from wherever it is called, and not in the default one."""
    monkeypatch.chdir(tmp_path)
    process = run("up", *options, "--folder", "mine")
    assert process.communicate(timeout=30)[0].startswith("mooncake://")
    assert pool("status").exit_code == 1
    assert pool("status", "--folder", str(tmp_path / "mine")).exit_code == 0
    assert pool("down").stdout == f"no pool of {folder} ran\n"
    assert pool("down", "--folder", "mine").stdout == "ended the master and the owner\n"


def test_without_a_cache_of_its_own_the_folder_is_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the base directory specification says; an empty variable counts as none."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pool("down").stdout == f"no pool of {tmp_path}/.cache/kvtide/pool ran\n"
