from __future__ import annotations

import json
import unicodedata

import pytest

from model_store.cli.main import main
from model_store.errors import SpecInvalid
from model_store.maintenance.forget import forget_class
from model_store.names import (
    check_name,
    is_same,
    new_class_name,
    notes_on_look_alikes,
    spelt_among,
)
from model_store.store.store import Store
from model_store.tables import printable
from tests.model_store.drafts import publish_lineage

COMPOSED = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
COOK = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{COOKING}"
WANT = "می\N{ZERO WIDTH NON-JOINER}خواهم"
HEART = "\N{HEAVY BLACK HEART}\N{VARIATION SELECTOR-16}\N{ZERO WIDTH JOINER}\N{FIRE}"
KSHA = "क\N{DEVANAGARI SIGN VIRAMA}\N{ZERO WIDTH JOINER}ष"


@pytest.mark.parametrize("name", [COOK, WANT, HEART, KSHA, "Straße 7", "数字", "a'b\"c"])
def test_names_in_any_script_and_emoji_are_accepted(name: str) -> None:
    assert new_class_name(name) == name
    assert printable(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        " a",
        "line\nbreak",
        "evil\x1b[2J",
        "a\N{RIGHT-TO-LEFT OVERRIDE}b",
        "a\N{LEFT-TO-RIGHT ISOLATE}b",
        "a\N{ZERO WIDTH SPACE}b",
        "a\N{SOFT HYPHEN}b",
        "c\N{ZERO WIDTH JOINER}at",
        "ca\N{ZERO WIDTH NON-JOINER}t",
        f"{COOK}\N{ZERO WIDTH JOINER}",
        f"\N{ZERO WIDTH JOINER}{COOK}",
        "\N{ZERO WIDTH JOINER}",
        "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ZERO WIDTH JOINER}\N{COOKING}",
        "lone \ud800",
        "a" * 201,
        "up/down",
        "up\\down",
        "..",
    ],
)
def test_names_that_hide_something_or_name_no_folder_are_refused(name: str) -> None:
    with pytest.raises(SpecInvalid):
        new_class_name(name)


def test_a_new_name_is_kept_composed_and_found_in_either_spelling() -> None:
    assert COMPOSED != DECOMPOSED
    assert new_class_name(DECOMPOSED) == COMPOSED
    assert is_same(COMPOSED, DECOMPOSED)
    assert spelt_among(COMPOSED, ["tea", DECOMPOSED]) == DECOMPOSED
    assert spelt_among(COMPOSED, [DECOMPOSED, COMPOSED]) == COMPOSED
    assert spelt_among("milk", [DECOMPOSED]) is None
    assert check_name(DECOMPOSED, what="the class name") == DECOMPOSED  # older versions have it


def test_names_that_differ_in_case_or_form_only_are_noted() -> None:
    assert notes_on_look_alikes(["Digit_0", "digit_1"]) == ()
    (note,) = notes_on_look_alikes(["Digit_0", "digit_0"])
    assert "'Digit_0' and 'digit_0' differ in case or form only" in note
    (note,) = notes_on_look_alikes(["STRASSE"], known=["Straße", "road"])
    assert "'Straße' and 'STRASSE'" in note
    assert len(notes_on_look_alikes(["\N{LATIN SMALL LIGATURE FI}sh"], known=["fish"])) == 1


@pytest.fixture
def older(location: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store from before names were composed: version 2 has a class in NFD."""
    store = Store.open(location)
    publish_lineage(store, 1)
    with monkeypatch.context() as before:
        before.setattr("model_store.maintenance.edit_classes.new_class_name", lambda name: name)
        assert main(["rename-class", "class-0a", DECOMPOSED, "--store", location]) == 0
    assert store.manifest(2).classes == (DECOMPOSED, "class-0b")
    return store


def test_a_decomposed_class_of_an_older_version_is_cared_for_in_either_spelling(
    older: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--store", older.location)
    assert main(["rename-class", "class-0b", COMPOSED, *place]) == 1
    assert "already" in capsys.readouterr().err
    assert forget_class(older, COMPOSED, actor="tests", reason="").shards
    assert main(["rename-class", COMPOSED, COMPOSED, *place]) == 0  # composes it
    assert older.manifest(3).classes == (COMPOSED, "class-0b")
    assert main(["retire-class", DECOMPOSED, *place]) == 0
    assert older.manifest(4).retired == (COMPOSED,)
    assert older.verify().ok


def test_renaming_to_a_look_alike_is_noted(
    location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_lineage(Store.open(location), 1)
    capsys.readouterr()
    place = ("--store", location, "--json")
    assert main(["rename-class", "class-0b", "Class-0A", *place]) == 0
    said = capsys.readouterr()
    assert "note: the classes 'class-0a' and 'Class-0A' differ in case" in said.err
    assert len(json.loads(said.out)["notes"]) == 1
    assert main(["rename-class", "class-0a", "in/out", *place]) == 2
    assert "cannot name a folder" in capsys.readouterr().err
