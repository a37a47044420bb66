"""Links that leave docs/ work in the repository; in the site, the benchmarks have pages of their own and other files are named without a link.

The pages of the benchmarks come from bench/results, so their links start there.
"""

from __future__ import annotations

import posixpath
import re

LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
WRITTEN_IN = {"benchmarks": "bench/results"}  # a folder of the site, and the folder of its sources


def on_page_markdown(markdown: str, page, **_: object) -> str:
    source = page.file.src_uri
    folder = posixpath.dirname(source)

    def rewritten(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join(WRITTEN_IN.get(folder, f"docs/{folder}"), target))
        if path.startswith("docs/"):
            return match[0]
        if path.startswith("bench/results/"):
            name = path.removeprefix("bench/results/")
            inside = posixpath.relpath(
                f"benchmarks/{'index.md' if name in ('README.md', '') else name}", folder or "."
            )
            return f"{image}[{text}]({inside}{anchor})"
        return f"{text} (`{path}`)" if path.rsplit("/")[-1] not in text else text

    return LINK.sub(rewritten, markdown)
