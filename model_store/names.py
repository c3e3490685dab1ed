"""Check names of classes and tasks, and tell whether two names are the same.

Names reach file listings, logs, pages and metrics. Systems spell one letter in two ways: é as one
character (NFC) or as e and an accent (NFD). New names are kept in NFC. Names that a store holds
already keep their spelling.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable

from model_store.errors import SpecInvalid

_MAX_NAME_LENGTH = 200
JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
_JOINED = frozenset({"Lo", "Lm", "Mn", "Mc", "So", "Sk", "Sm"})
"""Categories of characters that joiners stand between: letters without case, marks and symbols.
In scripts with case a joiner shows nothing, and would make two names look alike."""
SEPARATORS = "/\\"


def check_name(name: str, *, what: str) -> str:
    """Refuse a name that is blank, too long, or has invisible characters."""
    if not name or name != name.strip() or not is_shown(name):
        raise SpecInvalid(f"{what} {name!r} must be printable text without surrounding spaces")
    if len(name) > _MAX_NAME_LENGTH:
        raise SpecInvalid(f"{what} {name[:40]!r}… is longer than {_MAX_NAME_LENGTH} characters")
    return name


def new_name(name: str, *, what: str) -> str:
    """Check a new name, and spell it in NFC."""
    return check_name(unicodedata.normalize("NFC", name), what=what)


def new_class_name(name: str) -> str:
    """Check a name for a new class. It must be the name of a folder too: `--extend` and
    `--val-data` find a class by its folder."""
    if name in {".", ".."} or any(separator in name for separator in SEPARATORS):
        raise SpecInvalid(f"the class name {name!r} cannot name a folder: leave out / and \\")
    return new_name(name, what="the class name")


def is_shown(text: str) -> bool:
    """Return whether every character is printable, or joins two that are: 👩‍🍳, می‌خواهم."""
    return all(
        char.isprintable() or (char in JOINERS and _joins(text[max(0, place - 1) : place + 2]))
        for place, char in enumerate(text)
    )


def is_same(name: str, other: str) -> bool:
    """Return whether two spellings are one name."""
    return unicodedata.normalize("NFC", name) == unicodedata.normalize("NFC", other)


def spelt_among(name: str, known: Collection[str]) -> str | None:
    """Find the spelling of the same name among `known`; None where it is not there."""
    return (
        name
        if name in known
        else next((spelling for spelling in known if is_same(spelling, name)), None)
    )


def notes_on_look_alikes(names: Iterable[str], *, known: Iterable[str] = ()) -> tuple[str, ...]:
    """Write a note for each name that differs from another one, or from a known one, in case or
    form only: the two may be meant as one class."""
    seen: dict[str, str] = {}
    for spelling in known:
        seen.setdefault(_look(spelling), spelling)
    notes = []
    for name in names:
        other = seen.setdefault(_look(name), name)
        if other != name:
            notes.append(
                f"the classes {other!r} and {name!r} differ in case or form only, and are two "
                "classes; `dne-store rename-class` or another folder name tells them apart"
            )
    return tuple(notes)


def _look(name: str) -> str:
    bare = "".join(char for char in name if char not in JOINERS)
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", bare).casefold())


def _joins(around: str) -> bool:
    """Return whether the joiner in the middle has characters on both sides that it can join."""
    return len(around) == 3 and {unicodedata.category(char) for char in around[::2]} <= _JOINED
