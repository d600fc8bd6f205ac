"""``kvtide demo`` as a user meets it: what is printed where, and the exit code."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

import kvtide.cli.demo as demo_command
from kvtide.cli import cli
from kvtide.engines.vllm.demo import DemoReport

GOOD = DemoReport(2048, 2016, 0.3, 0.03, 0.28, 8 << 20, 8257536, tokens_equal=True)
DIFFERENT = DemoReport(2048, 2016, 0.3, 0.03, 0.28, 8 << 20, 8257536, tokens_equal=False)
NOTHING = DemoReport(2048, 0, 0.3, 0.3, 0.28, 8 << 20, 0, tokens_equal=True)


def invoke(monkeypatch: pytest.MonkeyPatch, report: DemoReport, *arguments: str) -> Any:
    """Run the command with a demo that says one thing and returns ``report``."""
    seen: dict[str, Any] = {}

    def fake(**options: Any) -> DemoReport:
        seen.update(options)
        options["progress"]("engine 1 of 3")
        return report

    monkeypatch.setattr(demo_command, "run_demo", fake)
    result = CliRunner().invoke(cli, ["demo", *arguments])
    result.options = seen
    return result


def test_success_prints_a_table_and_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is on stdout and progress on stderr."""
    result = invoke(monkeypatch, GOOD)
    assert result.exit_code == 0
    assert "2,016" in result.stdout
    assert result.stdout.endswith("Times are single samples of one request on this machine.\n")
    assert "engine 1 of 3" not in result.stdout
    assert "engine 1 of 3" in result.stderr


def test_json_prints_one_object_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of stdout is one JSON object."""
    result = invoke(monkeypatch, GOOD, "--json")
    assert json.loads(result.stdout)["tokens_equal"] is True
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    "report,words", [(DIFFERENT, "different tokens"), (NOTHING, "loaded nothing")]
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_failure_exits_with_1_and_says_why(
    monkeypatch: pytest.MonkeyPatch, report: DemoReport, words: str, form: list[str]
) -> None:
    """The figures are printed all the same, the reason on stderr."""
    result = invoke(monkeypatch, report, *form)
    assert result.exit_code == 1
    assert words in result.stderr
    assert words not in result.stdout
    assert result.stdout


def test_options_reach_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option is passed on; the prompt is 2,048 tokens unless told otherwise."""
    result = invoke(
        monkeypatch, GOOD, "--model", "/m", "--store", "memory://", "--prompt-tokens", "512"
    )
    given = {name: result.options[name] for name in ("model", "store", "prompt_tokens")}
    assert given == {"model": "/m", "store": "memory://", "prompt_tokens": 512}
    assert invoke(monkeypatch, GOOD).options["prompt_tokens"] == 2048


def test_a_prompt_of_less_than_two_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be loaded from so little."""
    result = invoke(monkeypatch, GOOD, "--prompt-tokens", "63")
    assert result.exit_code == 2
    assert "--prompt-tokens" in result.stderr
