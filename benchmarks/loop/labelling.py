"""Count the key presses that it takes to name 60 photos of two new things among 200, in Chromium.

The person is a script that sees each photo and knows what is on it. It goes through the groups that
look alike, and presses only keys that the page tells of. Every press counts, a letter too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from playwright.sync_api import Page, expect

from benchmarks.figures import Figure, at_least, at_most
from benchmarks.loop.learning import (
    OLD,
    TOKEN,
    ask,
    learn_first,
    photos,
    until,
    write_photos,
)
from benchmarks.serving.one_server import own_server
from tests.chromium import chromium

NEW_CLASSES = 2
NEW_PHOTOS = 30
OTHERS = 14
"""Photos of each old class in the inbox."""
DRAWS = 3
TILE_PX = 150.0
"""Width of a tile, about."""
SETTLE_S = 30.0


def measure_labelling(
    folder: Path, *, cifar: Path, pretrained: Path, measured: dict[str, float]
) -> list[Figure]:
    """Fill an inbox through `/predict`, and have the script name the new things; some draws."""
    location = folder / "taught"
    os.environ["DNE_CACHE"] = str(folder / "cache")
    presses, right = [], 0
    with zipfile.ZipFile(cifar) as archive:
        names = sorted({name.split("/")[1] for name in archive.namelist()})
        for name in names[:OLD]:
            write_photos(archive, name, folder / "old" / name)
        learn_first(location, folder / "old", pretrained)
        for draw in range(DRAWS):
            new = random.Random(draw).sample(names[OLD:], NEW_CLASSES)
            counts = dict.fromkeys(names[:OLD], OTHERS) | dict.fromkeys(new, NEW_PHOTOS)
            pictures = {name: photos(archive, name, n, part="test") for name, n in counts.items()}
            person = _label(shutil.copytree(location, folder / f"draw {draw}"), pictures, new)
            presses.append(person.presses)
            right += person.right
            measured[f"key presses for {' and '.join(new)}"] = person.presses
    return [
        at_most("key presses to name 60 photos among 200, mean of three draws", mean(presses), 90),
        at_least("photos named rightly", right, DRAWS * NEW_CLASSES * NEW_PHOTOS),
    ]


def _label(location: Path, pictures: dict[str, list[bytes]], new: list[str]) -> Person:
    with own_server(location, "--collect", "sample=0%", admin_token=TOKEN) as server:
        url = server.url
        person = Person(_fill(url, pictures), new)
        person.label(url)
        for one in ask(f"{url}/inbox?state=labelled&limit=200")["items"]:
            assert person.truth[one["id"]] == one["judgement"]["label"], one
            person.right += 1
    return person


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A photo on the page, in a row."""

    id: str
    group: str
    left: float
    row: int

    def steps_to(self, other: Tile) -> int:
        """Count the arrow keys to another tile."""
        return abs(other.row - self.row) + round(abs(other.left - self.left) / TILE_PX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """Keys that lead to a place from which arrows go on."""

    keys: list[str]
    place: Tile

    def presses(self, to: Tile) -> int:
        return len(self.keys) + self.place.steps_to(to)


def _jumps(tiles: dict[str, Tile], here: Tile) -> list[Jump]:
    """List the places that keys lead to at once."""
    order = list(tiles.values())
    firsts: dict[str, Tile] = {}
    for tile in order:
        firsts.setdefault(tile.group, tile)
    groups = list(firsts)
    mine = groups.index(here.group)
    back = 0 if here == firsts[here.group] else 1
    found = [
        Jump(keys=[], place=here),
        Jump(keys=["Home"], place=order[0]),
        Jump(keys=["End"], place=order[-1]),
        Jump(keys=["End", "PageUp"], place=firsts[groups[-1]]),
    ]
    for place, group in enumerate(groups):
        if place > mine:
            found.append(Jump(keys=["PageDown"] * (place - mine), place=firsts[group]))
        elif back or place < mine:
            found.append(Jump(keys=["PageUp"] * (mine - place + back), place=firsts[group]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A way to name the photos of one thing in a group."""

    name: str
    group: list[Tile]
    at_once: bool
    photos: int
    presses: int
    """How many it takes, from where the focus is."""


class Person:
    """Someone who knows what is on each photo. `truth` has its name by the id of the item."""

    def __init__(self, truth: dict[str, str], new: list[str]) -> None:
        self.truth = truth
        self._old = sorted({*truth.values()} - {*new})
        self.right = 0
        self.presses = 0
        self._new = new
        self._given: list[str] = []

    def label(self, url: str) -> None:
        with chromium() as browser:
            self._page = browser.new_page(viewport={"width": 1440, "height": 1000})
            self._page.add_init_script(f"sessionStorage.setItem('dne-label-token', '{TOKEN}')")
            self._page.goto(f"{url}/label")
            self._expect(len(self.truth))
            self._page.locator(".tile[tabindex='0']").focus()
            while (step := self._best_step()) is not None:
                self._do(step)

    def _best_step(self) -> Step | None:
        """Choose the group, and the way to name it, that names most photos a press."""
        tiles = self._shown()
        jumps = _jumps(tiles, tiles[self._focused()])
        groups: dict[str, list[Tile]] = {}
        for tile in tiles.values():
            groups.setdefault(tile.group, []).append(tile)
        steps = [
            step
            for group in groups.values()
            for name in {self.truth[tile.id] for tile in group} & {*self._new}
            for step in self._steps(name, group, jumps)
        ]
        return max(steps, key=lambda step: step.photos / step.presses, default=None)

    def _steps(self, name: str, group: list[Tile], jumps: list[Jump]) -> Iterator[Step]:
        """List two ways to name the photos of one thing in a group: one after the other, and all
        at once, when the others are taken out before."""
        right = [place for place, tile in enumerate(group) if self.truth[tile.id] == name]
        typed = len(self._letters(name))
        for upto in range(1, len(right) + 1):
            some = right[:upto]
            walk = min(jump.presses(group[some[0]]) for jump in jumps)
            yield Step(
                name=name,
                group=group,
                at_once=False,
                photos=upto,
                presses=walk + typed + some[-1] - some[0] + 1,
            )
        strangers = [place for place in range(len(group)) if place not in right]
        out = strangers[-1] + len(strangers) if strangers else 0
        walk = min(jump.presses(group[0]) for jump in jumps)
        yield Step(
            name=name,
            group=group,
            at_once=True,
            photos=len(right),
            presses=walk + out + typed + 2,
        )

    def _do(self, step: Step) -> None:
        left = len(self._shown())
        if step.at_once:
            self._go(step.group[0])
            self._press("Shift+Enter")
            strangers = [n for n, one in enumerate(step.group) if self.truth[one.id] != step.name]
            for here, there in zip([0, *strangers], strangers, strict=False):
                for _ in range(there - here):
                    self._press("Control+ArrowRight")
                self._press("Space")
            self._give(step.name, left=left - step.photos)
            return
        right = [tile for tile in step.group if self.truth[tile.id] == step.name]
        for done, tile in enumerate(right[: step.photos], 1):
            self._go(self._shown()[tile.id])
            self._give(step.name, left=left - done)

    def _go(self, to: Tile) -> None:
        """Go to a tile by the keys that are fewest: some to a place, and arrows from there."""
        tiles = self._shown()
        keys = min(_jumps(tiles, tiles[self._focused()]), key=lambda way: way.presses(to)).keys
        for key in keys:
            self._press(key)
        while (here := tiles[self._focused()]).id != to.id:
            if here.row != to.row:
                self._press("ArrowDown" if to.row > here.row else "ArrowUp")
            else:
                self._press("ArrowRight" if to.left > here.left else "ArrowLeft")

    def _give(self, name: str, *, left: int) -> None:
        """Type a name as far as it takes; `left` are the tiles that stay."""
        for letter in self._letters(name):
            self._press(letter)
        self._press("Enter")
        if name in self._given:
            self._given.remove(name)
        self._given.insert(0, name)
        self._expect(left)

    def _letters(self, name: str) -> str:
        """Return what has to be typed until the name is the first that is offered: nothing for
        the name that was given last, and all of a new one."""
        if name not in self._given:
            return name
        if name == self._given[0]:
            return ""
        offered = [*self._given, *self._old]
        return next(
            name[:end]
            for end in range(1, len(name) + 1)
            if next(one for one in offered if one.startswith(name[:end])) == name
        )

    def _expect(self, tiles: int) -> None:
        """Wait until so many photos are shown."""
        expect(self._page.locator(".tile")).to_have_count(tiles, timeout=1000 * SETTLE_S)

    def _press(self, key: str) -> None:
        self._page.keyboard.press(key)
        self.presses += 1

    def _focused(self) -> str:
        found = self._page.locator(".tile[tabindex='0']").get_attribute("data-id")
        assert found is not None
        return found

    def _shown(self) -> dict[str, Tile]:
        """Return the tiles in the order of the page, by the ids of their items."""
        found: list[tuple[str, str, float, float]] = self._page.eval_on_selector_all(
            ".tile",
            """tiles => tiles.map((tile) => {
              const box = tile.getBoundingClientRect();
              return [tile.dataset.id, tile.dataset.group, box.left, Math.round(box.top + scrollY)];
            })""",
        )
        rows = {top: row for row, top in enumerate(sorted({top for *_, top in found}))}
        return {
            item: Tile(id=item, group=group, left=left, row=rows[top])
            for item, group, left, top in found
        }

    _page: Page


def _fill(url: str, pictures: dict[str, list[bytes]]) -> dict[str, str]:
    """Have pictures answered and kept. Return the name of each by the id of its item."""
    truth: dict[str, str] = {}
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "image/jpeg"}
    for name, some in pictures.items():
        for data in some:
            request = urllib.request.Request(f"{url}/predict?keep=true", data, headers)
            with urllib.request.urlopen(request) as answer:
                truth[json.load(answer)["predictions"][0]["id"]] = name
        # The hand-over to the inbox is bounded: what does not fit would be dropped.
        until(lambda: ask(f"{url}/inbox?limit=1")["counts"]["unlabelled"] == len(truth))
    return truth
