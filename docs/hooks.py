"""What mkdocs does beyond its own: pages link to the sources, which are no part of the site."""

from __future__ import annotations

import re
from typing import Any

_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:src|tests|benchmarks)/[^)]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: object) -> str:  # noqa: ANN401
    """Lead links to sources to the repository, or name the file where no repository is named."""
    repository = (config.repo_url or "").rstrip("/")

    def told(link: re.Match[str]) -> str:
        text, path = link.groups()
        if repository:
            return f"[{text}]({repository}/blob/main/{path})"
        if text.strip("`") == path.rpartition("/")[2]:
            return f"`{path}`"
        in_parentheses = link.string[link.start() - 1 : link.start()] == "("
        return f"{text} in `{path}`" if in_parentheses else f"{text} (`{path}`)"

    return _SOURCE.sub(told, markdown)
