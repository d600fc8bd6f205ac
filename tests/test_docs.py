"""The documentation says what the code does."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import kvtide
from kvtide.config import PoolConfig, options
from kvtide.errors import KVTideError

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


def test_the_configuration_in_the_readme_is_accepted() -> None:
    """What the README tells people to type is valid."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [typed] = re.findall(r"--kv-transfer-config '(.*)'", readme)
    config = json.loads(typed)
    pool = PoolConfig.from_mapping(config["kv_connector_extra_config"], config["kv_role"])
    assert pool.store.startswith("local:///dev/shm/")
    assert config["kv_connector_module_path"] == "kvtide.engines.vllm"


def test_links_between_pages_lead_somewhere() -> None:
    """Each relative link in README, CONTRIBUTING and the pages has a file at its end."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    for file in files:
        for target in re.findall(r"\]\(([^)#:]+)\)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    """No page is left out of the site."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in navigation
