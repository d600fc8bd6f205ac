"""Write the pages that are made from the code: ``python docs/generate.py``.

``tests/test_docs.py`` fails while a page differs from what this would write.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import click

from kvtide import errors
from kvtide.cli import cli
from kvtide.config import ROLES, options
from kvtide.core import requests
from kvtide.core.requests import NEW_LIFE, TRANSITIONS, RequestEvent, RequestState
from kvtide.metrics import COUNTERS, GAUGES

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/generate.py from the code: change it there, then run `make docs`. -->\n"


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "configuration.md": configuration(),
        "cli.md": command_line(),
        "errors.md": error_classes(),
        "metrics.md": metrics(),
        "request-states.md": request_states(),
    }


CONFIGURATION = """\
Under vLLM the settings go into `kv_connector_extra_config`:

```json
{"kv_connector": "KVTideConnector",
 "kv_connector_module_path": "kvtide.engines.vllm",
 "kv_role": "kv_both",
 "kv_connector_extra_config": {"store": "local:///dev/shm/kvtide?size=20GiB"}}
```

`kv_role` is one of %s. Producers and `kv_both` save and load; a consumer loads, and saves
nothing but, with `save_decode_cache`, what it generates.

A wrong configuration is refused at start, with every fault in one message. A setting that does not
exist is a fault too, and the message names the nearest one that does.

| setting | default | unit | accepts | meaning |
|---|---|---|---|---|
%s

Sizes are numbers of bytes, or strings with a unit: `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024) or
`kB`, `MB`, `GB`, `TB` (powers of 1000).

`backoff_s` must be at most `max_backoff_s`, and `lookup_wait_ms` at most `lookup_timeout_ms`.
"""

ERRORS = """\
What kvtide raises on purpose, importable from `kvtide`. What happens to a single key is never an
exception but a `Status`.

%s
"""

METRICS = """\
Counters only go up. Each is a Prometheus counter at vLLM's own endpoint,
`vllm:kvtide_<name>_total`, with vLLM's labels; those that moved are in vLLM's periodic log line;
and with `stats_path` all that ever moved are in a JSON file. Jobs that end, chunks and bytes are
counted on each rank and summed: with two ranks each store job ends twice. To compare engines of
different sizes, compare bytes.

| counter | what it counts |
|---|---|
%s

The file has two numbers more, which go up and down:

| name | what it is |
|---|---|
%s
"""

STATES = """\
What the pool remembers of a request, from
[`TRANSITIONS`](../src/kvtide/core/requests.py). A row is a state, a column an event, a cell the
state that follows. An empty cell leaves the state as it is.

%s

%s

After %s nothing that is still under way belongs to
the request any more: its progress is forgotten, and a report that comes late updates a record that
nobody reads.
"""


def configuration() -> str:
    """Return the page about the settings."""
    rows = []
    for option in options():
        metadata = option.metadata
        default = metadata["default"]
        shown = str(default).lower() if isinstance(default, bool) else default
        rows.append(
            row(
                f"`{option.name}`",
                f"`{shown}`" if shown != "" else "",
                metadata["unit"],
                metadata["accepts"],
                metadata["doc"],
            )
        )
    roles = ", ".join(f"`{role}`" for role in ROLES)
    return page("Configuration", CONFIGURATION % (roles, "\n".join(rows)))


def command_line() -> str:
    """Return the page about the command's verbs and their options."""
    sections = []
    for path, command in commands(cli, "kvtide"):
        lines = [f"## {path}", "", inspect.cleandoc(command.help or ""), ""]
        shown = [option for option in command.params if isinstance(option, click.Option)]
        if shown:
            lines += [row("option", "default", "meaning"), "|---|---|---|"]
        for option in shown:
            names = " ".join([", ".join(option.opts), option.metavar or ""]).strip()
            default = option.show_default
            if default is True:
                default = str(option.default)
            lines.append(row(f"`{names}`", default or "", option.help or ""))
        sections.append("\n".join(lines).rstrip() + "\n")
    return page("Command line", "\n".join(sections))


def error_classes() -> str:
    """Return the page about the errors, each below the one it derives from."""
    lines = []
    for depth, error in hierarchy(errors.KVTideError):
        summary = inspect.cleandoc(error.__doc__ or "").splitlines()[0]
        lines.append(f"{'    ' * depth}- `{error.__name__}`: {summary}")
    return page("Errors", ERRORS % "\n".join(lines))


def metrics() -> str:
    """Return the page about the counters."""
    tables = [
        "\n".join(row(f"`{name}`", text) for name, text in listed.items())
        for listed in (COUNTERS, GAUGES)
    ]
    return page("Metrics", METRICS % tuple(tables))


def request_states() -> str:
    """Return the page about the states of a request, drawn from the table of transitions."""
    meanings = member_docs(RequestState)
    states = [f"- **{state.value}**: {meanings[state.name]}" for state in RequestState]
    lines = [
        row("", *(event.value for event in RequestEvent)),
        "|---" * (len(RequestEvent) + 1) + "|",
    ]
    for state, following in TRANSITIONS.items():
        cells = (following[event].value if event in following else "" for event in RequestEvent)
        lines.append(row(f"**{state.value}**", *cells))
    ends = sorted(event.value for event in NEW_LIFE)
    events = ", ".join(f"*{event}*" for event in ends[:-1]) + f" and *{ends[-1]}*"
    return page("Request states", STATES % ("\n".join(states), "\n".join(lines), events))


def member_docs(enum: type[RequestState]) -> dict[str, str]:
    """Return the string below each member of an enumeration, in one line."""
    [body] = [
        node.body
        for node in ast.parse(inspect.getsource(requests)).body
        if isinstance(node, ast.ClassDef) and node.name == enum.__name__
    ]
    docs = {}
    for member, text in itertools.pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr):
            docs[ast.unparse(member.targets[0])] = " ".join(ast.literal_eval(text.value).split())
    return docs


def page(title: str, text: str) -> str:
    """Return a page, with the note that it is generated."""
    return f"# {title}\n\n{NOTE}\n{text}"


def row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cells) + " |"


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below ``group``, itself first, with what a user types for it."""
    yield path, group
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def hierarchy(
    base: type[errors.KVTideError], depth: int = 0
) -> Iterator[tuple[int, type[errors.KVTideError]]]:
    """Yield ``base`` and what derives from it in ``kvtide.errors``, with how deep it lies."""
    yield depth, base
    for error in sorted(base.__subclasses__(), key=lambda error: error.__name__):
        if error.__module__ == errors.__name__:
            yield from hierarchy(error, depth + 1)


def main() -> None:
    """Write every page that has changed."""
    for name, text in pages().items():
        path = HERE / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
