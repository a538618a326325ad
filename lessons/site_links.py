"""A hook of the site's build: links between notebooks are right in Jupyter as they stand; here they become links of pages."""

import posixpath
import re
from typing import Any


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Point href="name.ipynb" and href="name.md" to the pages that these files became."""

    def turned(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path)))
        if target is None:
            raise ValueError(f"{page.file.src_uri} links to {path}, which is not in the site")
        return f'href="{target.url_relative_to(page.file)}{anchor}"'

    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'href="(?!\w+:)([^"#]+\.(?:ipynb|md))(#[^"]*)?"', turned, html)
