"""The documentation says what the code does."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvtide
from kvtide.config import PoolConfig, options
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba, SlidingWindow
from kvtide.core.jobs import BoundaryJob, JobEnd, JobReport, StepPlan, unpack_ints
from kvtide.core.keys import HashWindow
from kvtide.core.save_limits import SaveLimits
from kvtide.core.scheduler import PoolScheduler, StepEvents
from kvtide.core.transfer import HandOff, Scheduled
from kvtide.errors import ConfigError, KVTideError
from kvtide.metrics import COUNTERS, GAUGES
from kvtide.runtime.tags import tag_for
from kvtide.stores import StoreUrl
from kvtide.testing.lookups import ManualLookups
from kvtide.testing.requests import RecordingRequest, fake_hashes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load_generator() -> ModuleType:
    """Import ``docs/generate.py``, which is a script."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = load_generator().pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    """The page on disk is what the code says now; `make docs` writes it."""
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == PAGES[name], f"docs/{name} is stale: run `python docs/generate.py`"


def test_every_option_is_documented() -> None:
    """Each option has a row of its own."""
    for option in options():
        assert f"\n| `{option.name}` |" in PAGES["configuration.md"]


def test_every_verb_is_documented() -> None:
    """Each verb of the command has a section of its own, with its options."""
    generator = load_generator()
    for path, command in generator.commands(generator.cli, "kvtide"):
        assert f"\n## {path}\n" in PAGES["cli.md"]
        for parameter in command.params:
            for flag in parameter.opts:
                assert flag in PAGES["cli.md"]


def test_every_error_is_documented_and_public() -> None:
    """Each error class has its line, and can be imported from ``kvtide``."""
    pending = [KVTideError]
    while pending:
        error = pending.pop()
        pending += error.__subclasses__()
        if error.__module__ == "kvtide.errors":
            assert f"- `{error.__name__}`: " in PAGES["errors.md"]
            assert error.__name__ in kvtide.__all__


def test_every_law_of_a_store_is_in_the_guide() -> None:
    """The guide has as many laws as the contract has sentences about them."""
    guide = (DOCS / "writing-a-store.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\d+\. ", guide, re.MULTILINE)) == 13
    for method in ("register", "exists", "put", "get", "remove", "close"):
        assert f"def {method}(" in guide


def test_the_example_of_a_store_keeps_the_laws(tmp_path: Path) -> None:
    """The guide's store passes the guide's tests, and opens by its URL."""
    guide = (DOCS / "writing-a-store.md").read_text(encoding="utf-8")
    store, tests = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[-2:]
    (tmp_path / "acme_kv").mkdir()
    (tmp_path / "acme_kv" / "store.py").write_text(store)
    (tmp_path / "test_store.py").write_text(tests)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_store.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    namespace: dict[str, Any] = {"__name__": "acme_kv.store"}
    exec(store, namespace)  # noqa: S102 - our own page
    url = f"folder://{tmp_path}/values?size=1MiB"
    opened = namespace["open_folder"](StoreUrl.parse(url))
    assert opened.capacity_bytes == 1 << 20
    with pytest.raises(ConfigError, match="needs a size"):
        namespace["open_folder"](StoreUrl.parse(f"folder://{tmp_path}/values"))


def test_the_configuration_in_the_readme_is_accepted() -> None:
    """What the README tells people to type is valid."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [typed] = re.findall(r"--kv-transfer-config '(.*)'", readme)
    config = json.loads(typed)
    pool = PoolConfig.from_mapping(config["kv_connector_extra_config"], config["kv_role"])
    assert pool.store.startswith("local:///dev/shm/")
    assert config["kv_connector_module_path"] == "kvtide.engines.vllm"


def test_every_counter_and_gauge_is_documented() -> None:
    """Each has a row of its own, and what other pages call a counter is one."""
    for name in (*COUNTERS, *GAUGES):
        assert f"\n| `{name}` |" in PAGES["metrics.md"]
    table = (DOCS / "operations.md").read_text(encoding="utf-8").partition("## The local store")[0]
    known = {*COUNTERS, *(option.name for option in options())}
    mentioned = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", table))
    assert mentioned <= known | {"kv_load_failure_policy"}, mentioned - known


def all_pages() -> list[Path]:
    """Return every page of text, those that people read on the repository's site included."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_links_between_pages_lead_somewhere() -> None:
    """Each relative link in README, CONTRIBUTING and the pages has a file at its end."""
    for file in all_pages():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8")):
            if target != "../src/kvtide/...":  # how such a link is written, in CONTRIBUTING
                assert (file.parent / target).exists(), f"{file.name} links to {target}"


def defined_names(file: Path) -> set[str]:
    """Return the names that a module defines, those in classes with the class before them."""
    names: set[str] = set()

    def collect(body: list[ast.stmt], head: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(head + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{head}{node.name}.")
            if isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(head + ast.unparse(target) for target in targets)

    collect(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return names


def test_every_name_that_links_to_the_code_is_defined_there() -> None:
    """The text of a link to a module is its file name, or names that it defines."""
    num_links = 0
    link = re.compile(r"\[((?:`[\w.]+`(?:,\s+)?)+)\]\(((?:\.\./)+src/[^)]+)\)")
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        found = link.findall(text)
        assert len(found) == len(re.findall(r"\]\((?:\.\./)+src/", text)), page
        for shown, target in found:
            file = page.parent / target
            for name in re.findall(r"`([\w.]+)`", shown):
                num_links += 1
                known = defined_names(file) | {file.name}
                assert name in known, f"{page.name}: {name} is not in {target}"
    assert num_links > 40


def test_every_page_is_in_the_navigation() -> None:
    """No page is left out of the site."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS)}\n" in navigation


def test_links_to_sources_name_the_file_on_the_site() -> None:
    """The site has no sources; with a repository named, the links lead there."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    text = "see [`a`](../src/kvtide/a.py) and [b](b.md)"
    bare, named = SimpleNamespace(repo_url=None), SimpleNamespace(repo_url="https://host/k/")
    assert hooks.on_page_markdown(text, config=bare) == "see `a` (`src/kvtide/a.py`) and [b](b.md)"
    inner = "([`a`](../src/a.py)), [`a.py`](../../src/a.py)"
    assert hooks.on_page_markdown(inner, config=bare) == "(`a` in `src/a.py`), `src/a.py`"
    linked = "see [`a`](https://host/k/blob/main/src/kvtide/a.py) and [b](b.md)"
    assert hooks.on_page_markdown(text, config=named) == linked


def test_the_table_of_a_tag_is_its_layout() -> None:
    """The concepts page gives each field the bytes that it has."""
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    ranges = [(int(low), int(high)) for low, high in re.findall(r"\n\| (\d+)-(\d+) \|", page)]
    tag = tag_for("key", memoryview(b"12345"))
    assert ranges[0][0] == 0
    assert ranges[-1][1] + 1 == len(tag)
    magic, version, zero, _, length, _ = (tag[low : high + 1] for low, high in ranges)
    assert magic == b"KVTD"
    assert [int.from_bytes(part, "little") for part in (version, zero, length)] == [1, 0, 5]


class Example:
    """The scheduler of the walkthrough's example: blocks of 16 tokens, a store that is a set."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        coordinator = Coordinator((FullAttention(16),), 16)
        self.lookups = ManualLookups(coordinator, lambda keys: [k in self.present for k in keys])
        self.scheduler = PoolScheduler(
            coordinator,
            self.lookups,
            limits=SaveLimits(max_pinned_blocks=100, max_job_tokens=1 << 20),
        )
        self.database = coordinator.databases("ns")[0][0]

    def arrive(self, num_tokens: int, held: int = 0) -> tuple[RecordingRequest, int | None, int]:
        """Return a new request, what is promised to it, and how many keys were asked for."""
        view = RecordingRequest(
            num_tokens=num_tokens, hashes=fake_hashes(num_tokens // 16), local_hit_tokens=held
        )
        self.lookups.asked.clear()
        self.scheduler.on_new_request(view, "ns", 0.0)
        promised = self.scheduler.match(view, held, 0.0)
        return view, promised, sum(map(len, self.lookups.asked))

    def step(self, *scheduled: Scheduled) -> tuple[StepPlan, list[int]]:
        """Return a step's plan and the blocks it pins."""
        return self.scheduler.step(StepEvents((), scheduled), 0.0)

    def stored(self, plan: StepPlan) -> list[int]:
        """Store a plan's job and return the blocks that are given back."""
        [job] = plan.stores
        self.present.update(map(self.database.key_for, job.hashes))
        report = JobReport()
        report.end(job.job_id, JobEnd.STORED)
        return self.scheduler.on_report(report, 0.0)


def test_the_example_of_the_walkthrough() -> None:
    """The numbers on the page are what the core does."""
    example = Example()
    view, promised, num_keys = example.arrive(100)
    assert (promised, num_keys) == (0, 6)
    plan, pins = example.step(Scheduled(view, 0, 64, is_admission=True))
    assert [(job.start_token, job.end_token) for job in plan.stores] == [(0, 64)]
    assert pins == [1, 2, 3, 4]
    assert example.stored(plan) == [4, 3, 2, 1]
    plan, pins = example.step(Scheduled(view, 64, 36, is_admission=False))
    assert [(job.start_token, job.end_token) for job in plan.stores] == [(64, 96)]
    assert pins == [5, 6]
    assert example.stored(plan) == [6, 5]
    assert not example.step(Scheduled(view, 100, 1, is_admission=False))[0]

    view, promised, num_keys = example.arrive(100)
    assert (promised, num_keys) == (96, 6)
    example.scheduler.on_allocated(view, 96)
    [load] = example.step()[0].loads
    assert (load.start_token, load.end_token) == (0, 96)
    assert len(unpack_ints(load.block_ids[0])) == 6
    example.scheduler.on_load_finished(view.request_id)
    assert not example.step(Scheduled(view, 96, 4, is_admission=True))[0]

    assert example.arrive(97)[1] == 96
    assert example.arrive(96)[1] == 80
    assert example.arrive(100, held=48)[1:] == (48, 5)


def test_the_example_of_the_groups_page() -> None:
    """Full attention, a window and a state: what is stored, asked and loaded."""
    groups = (FullAttention(16), SlidingWindow(16, 20), Mamba(64))
    coordinator = Coordinator(groups, 16)
    present: set[str] = set()
    lookups = ManualLookups(coordinator, lambda keys: [key in present for key in keys])
    limits = SaveLimits(max_pinned_blocks=100, max_job_tokens=1 << 20)
    scheduler = PoolScheduler(coordinator, lookups, limits=limits)
    databases = [ranks[0] for ranks in coordinator.databases("ns")]
    tables = [list(range(1, 13)), list(range(21, 33)), [0, 0, 43]]
    view = RecordingRequest(num_tokens=200, hashes=fake_hashes(12), tables=tables)

    scheduler.on_new_request(view, "ns", 0.0)
    assert scheduler.match(view, 0, 0.0) == 0
    offers = {view.request_id: [HandOff(2, 41 + i, 64 * (i + 1)) for i in range(3)]}
    admitted = [Scheduled(view, 0, 200, is_admission=True)]
    plan, pins = scheduler.step(StepEvents((), admitted, offers), 0.0)
    stored: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for job in plan.stores:
        if isinstance(job, BoundaryJob):
            for put in job.puts:
                stored[put.group_id].append(put.chunk_id)
        else:
            for group_id, packed in enumerate(job.block_ids):
                first = job.first_chunks[group_id]
                ids = unpack_ints(packed)
                stored[group_id] += [first + i for i, block in enumerate(ids) if block]
    assert stored == {0: [*range(12)], 1: [2, 3, 6, 7, 10, 11], 2: [0, 1, 2]}
    assert len(pins) == 12 + 6 + 3

    hashes = HashWindow(view.block_hashes)
    for database, chunks in zip(databases, stored.values(), strict=True):
        for chunk in chunks:
            present.update(database.keys(hashes, range(chunk, chunk + 1)))
    lookups.asked.clear()
    again = RecordingRequest("again", num_tokens=200, hashes=view.block_hashes, tables=tables)
    scheduler.on_new_request(again, "ns", 0.0)
    assert scheduler.match(again, 0, 0.0) == 192
    assert sum(map(len, lookups.asked)) == 15
    scheduler.on_allocated(again, 192)
    [load] = scheduler.step(StepEvents(), 0.0).plan.loads
    assert sum(len(unpack_ints(packed)) for packed in load.block_ids) == 15

    present -= set(databases[2].keys(hashes, range(2, 3)))
    shorter = RecordingRequest("shorter", num_tokens=200, hashes=view.block_hashes)
    scheduler.on_new_request(shorter, "ns", 0.0)
    assert scheduler.match(shorter, 0, 0.0) == 128
