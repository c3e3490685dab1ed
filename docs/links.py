"""Check the links of a built site: every page, file and anchor is there, and no asset is elsewhere.

A site must work on a machine without a network, so scripts, styles, fonts and pictures are its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""A browser fetches these by itself."""
CSS_URL = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


@dataclass
class Page(HTMLParser):
    """The anchors of a page, the addresses that it links to, and those that it fetches."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if address := given.get(ASSETS.get(tag, "")):
            self.assets.append(address)
        elif tag == "a" and (address := given.get("href")):
            self.links.append(address)


def problems_of(site: Path) -> list[str]:
    """Return a sentence for every link that leads nowhere and every asset of another host."""
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        found += [
            f"{here}: {one} is fetched from elsewhere" for one in page.assets if is_elsewhere(one)
        ]
        found += [
            f"{here}: {one} leads nowhere"
            for one in [*page.links, *page.assets]
            if not is_elsewhere(one) and not leads_somewhere(one, path, site=site, pages=pages)
        ]
    for path in sorted(site.rglob("*.css")):
        addresses = CSS_URL.findall(path.read_text())
        found += [f"{path.relative_to(site)}: {one} is fetched from elsewhere" for one in addresses]
    return found


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


def is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in {"", "data"}


def leads_somewhere(address: str, path: Path, *, site: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(address)
    if parts.scheme == "data":
        return True
    name = unquote(parts.path)
    found = site / name.lstrip("/") if name.startswith("/") else path.parent / name
    target = path if not name else found.resolve()
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return False
    anchor = unquote(parts.fragment)
    return not anchor or target not in pages or anchor in pages[target].ids
