from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from model_store.records.signing import Trust, new_signer, save_trust
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.data.sources.forms import zipped
from tests.trainer.folders import write_classes
from trainer.cli import main


def test_two_tasks_answer_with_one_json_object_each(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    assert dne_train.add(letters, "--json") == 0
    facts = json.loads(dne_train.out)  # nothing else is on stdout
    assert (facts["version"], facts["parent"], facts["promoted"]) == (1, None, True)
    assert "learning" in dne_train.err
    assert dne_train.add(digits, "--json") == 0
    facts = json.loads(dne_train.out)
    assert (facts["version"], facts["parent"], facts["classes"]) == (2, 1, 4)


def test_without_json_a_person_reads_what_came_of_it(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    dne_train.add(letters)
    assert dne_train.add(digits) == 0
    assert "version 2: 2 tasks, 4 classes" in dne_train.out
    assert "accuracy: all" in dne_train.out


def refused(command: Command, data: Path, *others: object, code: int) -> str:
    before = command.versions
    assert command.add(data, *others, "--json") == code
    assert command.versions == before
    assert command.out == ""
    return command.err.strip().splitlines()[-1]


def test_folders_with_nothing_to_learn_are_wrong_usage(dne_train: Command, tmp_path: Path) -> None:
    assert "does not exist" in refused(dne_train, tmp_path / "missing", code=2)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is empty" in refused(dne_train, empty, code=2)
    Image.new("RGB", (8, 8)).save(empty / "loose.png")
    assert "no class folders" in refused(dne_train, empty, code=2)
    assert not dne_train.store.exists()


def test_too_few_images_fail_with_how_many_are_needed(dne_train: Command, tmp_path: Path) -> None:
    data = write_classes(tmp_path / "data", ["a", "b"])
    write_classes(data, ["rare"], images=1)
    message = refused(dne_train, data, code=1)
    assert message.startswith("error: too few images: 'rare' has 1 image")
    assert "at least 2" in message


def test_a_known_class_fails_and_is_named(
    dne_train: Command, letters: Path, tmp_path: Path
) -> None:
    dne_train.add(letters)
    again = write_classes(tmp_path / "again", ["b", "c"])
    assert "the model knows 'b' already" in refused(dne_train, again, code=1)


def test_corrupt_images_fail_and_skip_bad_goes_on(dne_train: Command, letters: Path) -> None:
    (letters / "a" / "003.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    message = refused(dne_train, letters, code=1)
    assert "a/003.png" in message
    assert "--skip-bad" in message
    assert dne_train.add(letters, "--skip-bad") == 0
    assert "going on without 1 image" in dne_train.err


def test_stray_files_are_noted(dne_train: Command, letters: Path) -> None:
    (letters / ".DS_Store").write_bytes(b"\0")
    assert dne_train.add(letters) == 0
    assert "ignored" in dne_train.err
    assert ".DS_Store" in dne_train.err


def test_hostile_names_are_refused(dne_train: Command, letters: Path, tmp_path: Path) -> None:
    hostile = write_classes(tmp_path / "hostile", ["evil\x1b[2J"], images=2)
    message = refused(dne_train, hostile, code=2)
    assert "\x1b" not in message
    assert "task name" in refused(dne_train, letters, "--name", "line\nbreak", code=2)


def test_folders_one_level_deeper_are_refused_with_the_options_to_use(
    dne_train: Command, tmp_path: Path
) -> None:
    for split in ("train", "val", "other"):
        write_classes(tmp_path / "photos" / split, ["a", "b"])
    photos = tmp_path / "photos"
    told = refused(dne_train, photos, code=2)
    assert f"use --data {photos / 'train'} --val-data {photos / 'val'}" in told
    packed = zipped(photos, tmp_path / "photos.zip")
    told = refused(dne_train, packed, code=2)
    assert "one level deeper, in 'other', 'train', 'val': pack them without the folders" in told


def test_a_class_that_differs_from_a_known_one_in_case_is_named_with_it(
    dne_train: Command, letters: Path, tmp_path: Path
) -> None:
    assert dne_train.add(letters) == 0
    shouted = write_classes(tmp_path / "shouted", ["A"], images=3)
    assert "'a' is known: is 'A' meant to be" in refused(dne_train, shouted, "--extend", code=1)
    assert dne_train("evaluate", "--data", shouted) == 2
    assert "'a' is known: is 'A' meant to be that class?" in dne_train.err


def test_a_folder_of_tasks_is_refused_with_one_of_them_as_an_example(
    dne_train: Command, tmp_path: Path
) -> None:
    for task in ("birds", "cars", "test"):
        write_classes(tmp_path / "photos" / task, [f"{task} 1", f"{task} 2"])
    photos = tmp_path / "photos"
    told = refused(dne_train, photos, code=2)
    assert f"in 2 folders: give one of them at a time, as with --data {photos / 'birds'}" in told


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--memory", "-1"], "--memory must be 0 or more"),
        (["--epochs", "0"], "--epochs must be more than 0"),
        (["--batch-size", "-3"], "--batch-size must be more than 0"),
        (["--learning-rate", "nan"], "--learning-rate must be more than 0"),
        (["--seed", "-1"], "--seed must be between 0"),
        (["--threads", "0"], "--threads must be between 1 and 1024"),
        (["--threads", "99999999999"], "--threads must be between 1 and 1024"),
        (["--min-new", "most"], "'most' is not a share: give 0.8 or 80%"),
        (["--unknown-rate", "%"], "'%' is not a share: give 0.8 or 80%"),
        (["--max-drop", "two"], "'two' is not a number of points: give 2 or 0.5"),
        (["--heads", "0"], "heads of an expert must be between 1"),
        (["--patch-size", "3"], "cannot be cut into patches of 3"),
        (["--device", "abacus"], "invalid choice"),
        (["--channel", "No Channel"], "not a channel name"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(
    dne_train: Command, letters: Path, options: list[str], sentence: str
) -> None:
    assert sentence in refused(dne_train, letters, *options, code=2)


def test_sizes_are_fixed_by_the_first_task(dne_train: Command, letters: Path, digits: Path) -> None:
    dne_train.add(letters)
    assert "does not fit" in refused(dne_train, digits, "--preset", "tiny", code=2)


def test_a_pinned_channel_ends_with_3_and_the_command_that_would_promote(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    dne_train.add(letters)
    Store.open(str(dne_train.store)).rollback(
        channel="production", to=1, actor="tests", reason="hold"
    )
    assert dne_train.add(digits) == 3
    assert dne_train.versions == [1, 2]
    assert "not promoted: channel production is pinned to version 1" in dne_train.err
    assert "`dne-store promote 2 --channel production`" in dne_train.err


def test_the_last_lines_say_what_is_served_and_what_to_type_next(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    dne_train.add(letters)
    where = f"--store {dne_train.store}"
    served, *following = dne_train.out.splitlines()[-4:]
    assert served == "served: version 1; running servers load it by themselves"
    assert following[0] == "next:"
    assert f"  dne-serve {where}" in following[1]
    assert f"  dne-train add-task --data FOLDER {where}" in following[2]
    dne_train.add(digits)
    assert dne_train.out.splitlines()[-1].split() == [
        *("dne-store", "rollback", *where.split()),
        *["go", "back", "to", "version", "1"],
    ]


def test_the_last_lines_name_the_version_that_is_served_where_none_was_promoted(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    dne_train.add(letters, "--no-promote", "--channel", "staging")
    lines = dne_train.out.splitlines()
    assert lines[-4] == "served: nothing yet; version 1 is published and not promoted"
    assert lines[-1].startswith(
        f"  dne-store promote 1 --store {dne_train.store} --channel staging  "
    )
    Store.open(str(dne_train.store)).promote(
        1, channel="production", actor="tests", reason="to begin"
    )
    dne_train.add(digits, "--no-promote")
    assert dne_train.out.splitlines()[-4] == (
        "served: version 1, as before; version 2 is published beside it"
    )


def test_no_promote_ends_with_0(dne_train: Command, letters: Path) -> None:
    assert dne_train.add(letters, "--no-promote", "--json") == 0
    facts = json.loads(dne_train.out)
    assert (facts["promoted"], facts["refused"]) == (False, None)


def test_a_channel_without_a_version_is_wrong_usage_with_the_way_on(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    dne_train.add(letters)
    message = refused(dne_train, digits, "--channel", "canary", code=2)
    assert "`dne-store promote 1 --channel canary`" in message


def test_ctrl_c_ends_with_1_and_says_that_nothing_was_published(
    dne_train: Command, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.learning.learn.fit", stop)
    message = refused(dne_train, letters, code=1)
    assert message == "error: interrupted: nothing was published"


def test_evaluate_answers_with_the_figures_of_the_design(dne_train: Command, letters: Path) -> None:
    dne_train.add(letters)
    assert dne_train("evaluate", "--data", letters, "--json") == 0
    report = json.loads(dne_train.out)
    assert set(report) == {
        *("version", "images", "accuracy", "per_class", "confusion", "calibration_error"),
        *("calibration", "unknown", "levels"),
    }
    assert (report["version"], report["images"]) == (1, 24)
    assert dne_train("evaluate", "--data", letters) == 0
    assert "accuracy, all:" in dne_train.out


def test_evaluate_refuses_what_it_cannot_judge(
    dne_train: Command, letters: Path, digits: Path, tmp_path: Path
) -> None:
    assert dne_train("evaluate", "--data", letters) == 1
    assert "there is no store" in dne_train.err
    dne_train.add(letters)
    assert dne_train("evaluate", "--data", digits) == 2
    assert "which the model does not know" in dne_train.err
    assert dne_train("evaluate", "--data", letters, "--version", 9) == 1
    assert "there is no version 9" in dne_train.err
    (tmp_path / "bare" / "a").mkdir(parents=True)
    assert dne_train("evaluate", "--data", tmp_path / "bare") == 2
    assert "holds no images" in dne_train.err


def test_help_names_every_option_of_the_design(dne_train: Command) -> None:
    assert dne_train("add-task", "--help") == 0
    for option in (
        *("--data", "--name", "--preset", "--heads", "--epochs", "--memory", "--val-data"),
        *("--seed", "--no-promote", "--skip-bad", "--store", "--json", "--channel", "--reason"),
        *("--batch-size", "--learning-rate", "--device", "--threads", "--loss", "--augment"),
        *("--image-size", "--patch-size", "--depth", "--head-width", "--checkpoint", "--extend"),
        *("--max-drop", "--min-new", "--max-latency-ms", "--max-bytes", "--force"),
        *("--pretrained", "--unfreeze-last", "--normalise", "--attention-heads"),
        *("--unknown-rate", "--processes"),
    ):
        assert option in dne_train.out


def test_a_version_is_signed_with_the_key_that_is_given(
    dne_train: Command, letters: Path, digits: Path, tmp_path: Path
) -> None:
    signer = new_signer(tmp_path / "key.pem")
    save_trust(tmp_path / "trust.json", Trust({"ann": signer.public}))
    trust = ("--trust", tmp_path / "trust.json")
    assert dne_train.add(letters, "--sign", tmp_path / "key.pem", *trust) == 0
    signature = Store.open(str(dne_train.store)).manifest(1).signature
    assert signature is not None
    assert signature.key == signer.public
    assert dne_train.add(digits, "--sign", tmp_path / "no-such-key.pem", *trust) != 0
    assert "no-such-key.pem" in dne_train.err
    assert dne_train.versions == [1]


def test_a_refused_version_ends_with_3_and_says_why_and_force_ends_with_0(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    assert dne_train.add(letters) == 0
    assert dne_train.add(digits, "--max-bytes", 10, "--json") == 3
    facts = json.loads(dne_train.out)
    assert not facts["promoted"]
    assert facts["refused"].startswith("the gate refused it: it has ")
    assert (facts["gate"]["passed"], facts["gate"]["forced"]) == (False, False)
    assert dne_train.add(digits, "--max-bytes", 10) == 3
    assert "not promoted: the gate refused it" in dne_train.err
    assert dne_train.add(digits, "--max-bytes", 10, "--force") == 0
    assert "promoted by force, against the gate" in dne_train.err
    history = Store.open(str(dne_train.store)).history("production")
    assert [record.target for record in history] == [1, 4]
    assert "(forced: it has " in history[-1].reason


@pytest.mark.parametrize("given", ["100%", "1", "100", "1.0"])
def test_shares_are_taken_as_people_write_them(
    dne_train: Command, letters: Path, given: str
) -> None:
    """Two images of each class are held out: too few to show it."""
    assert dne_train.add(letters, "--min-new", given, "--json") == 3
    assert "a least accuracy of 100.0 % cannot be judged" in json.loads(dne_train.out)["refused"]


@pytest.mark.parametrize(
    "options",
    [
        ("--max-drop", "-1"),
        ("--max-drop", "nan"),
        ("--min-new", "150"),
        ("--min-new", "most"),
        ("--max-bytes", "0"),
        ("--max-latency-ms", "0"),
        ("--unknown-rate", "0"),
        ("--unknown-rate", "100%"),
    ],
)
def test_limits_that_make_no_sense_are_wrong_usage(
    dne_train: Command, letters: Path, options: tuple[str, str]
) -> None:
    assert dne_train.add(letters, *options) == 2
    assert options[0] in dne_train.err
    assert dne_train.versions == []


@pytest.mark.long
def test_evaluate_tells_how_unknown_images_are_told(
    dne_train: Command, letters: Path, digits: Path
) -> None:
    dne_train.add(letters)
    assert "only 4 images set the threshold for unknown images: about 20.0 %" in dne_train.out
    arguments = ("evaluate", "--data", letters, "--unknown-data", digits)
    assert dne_train(*arguments, "--json") == 0
    told = json.loads(dne_train.out)["unknown"]
    assert told["images"] == 24
    assert 0 <= told["auroc"] <= 1
    assert 0 <= told["false_accept_rate"] <= 1
    assert dne_train(*arguments) == 0
    assert "unknown images (24): AUROC" in dne_train.out


@pytest.mark.parametrize("size", ["few", "1.5", "Statistics"])
def test_memory_is_a_number_or_the_word_statistics(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["add-task", "--data", str(tmp_path), "--memory", size])
    assert ended.value.code == 2
    assert "neither a number of exemplars nor the word statistics" in capsys.readouterr().err


def test_memory_statistics_without_a_pre_trained_start_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_classes(tmp_path / "letters", ["a", "b"])
    store = ["--store", str(tmp_path / "models")]
    assert main(["add-task", "--data", str(data), "--memory", "statistics", *store]) == 2
    assert "is for a model with a pre-trained start" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
