"""What is counted is in one list, and everything in the list is counted somewhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

import kvtide
from kvtide.core.jobs import JobEnd
from kvtide.metrics import COUNTERS, GAUGES

SOURCES = Path(kvtide.__file__).parent


def literals(node: ast.expr) -> Iterator[str]:
    """Yield what a counter's name in the code may come to."""
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, str)
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        # The one kind of computed name: f"{end.value}_jobs".
        value, suffix = node.values
        assert isinstance(value, ast.FormattedValue)
        assert ast.unparse(value.value) == "end.value"
        for end in JobEnd:
            yield end.value + ast.literal_eval(suffix)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            assert key is not None
            yield from literals(key)
    # The parameter of a method that does the counting, and what a store counted.
    elif ast.unparse(node) not in ("name", "counters_of(self._store)"):
        raise AssertionError(f"the name of a counter must be a literal: {ast.unparse(node)}")


def counted() -> Iterator[str]:
    """Yield the name of every counter that some line of code raises."""
    for room in ("core", "runtime", "engines", "stores"):
        for file in (SOURCES / room).rglob("*.py"):
            if file.name == "wrappers.py":  # CountingStore counts for its caller
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                    if ast.unparse(node.target.value).endswith("counters"):
                        yield from literals(node.target.slice)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = ast.unparse(node.func.value)
                    if node.func.attr == "_count" or (owner, node.func.attr) == (
                        "self._ledger",
                        "count",
                    ):
                        yield from literals(node.args[0])


def test_every_counter_is_in_the_list_and_every_listed_one_is_counted() -> None:
    """What is not listed is exported nowhere; what is listed and counted nowhere stays 0."""
    assert set(counted()) == set(COUNTERS)


def test_every_counter_says_what_it_counts() -> None:
    """One sentence each; no name is both a counter and a gauge."""
    for text in (*COUNTERS.values(), *GAUGES.values()):
        assert text.endswith(".")
        assert "|" not in text
    assert not set(COUNTERS) & set(GAUGES)


def test_every_gauge_is_written() -> None:
    """The scheduler side writes the gauges beside the counters."""
    written = (SOURCES / "engines/vllm/scheduler_side.py").read_text(encoding="utf-8")
    for name in GAUGES:
        assert f'"{name}": ' in written
