"""Run `dne predict`, which asks a server about files and folders, and `dne models list`."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dne_client.answers import ListedModel, Outcome, Prediction
from dne_client.clients import CONNECTIONS, URL, Client
from dne_client.conversation import Retries
from dne_client.errors import BadInput, ClientError, Unreachable
from dne_client.images import Image
from model_store.command_line import Parser
from model_store.tables import columns, counted, csv_cell, percent, printable

FORMATS = ("table", "json", "jsonl", "csv")
_COLUMNS = ("file", "label", "score", "unknown", "unknown_score", "task", "version", "error")
_NAME_WIDTH = 40
_LABEL_WIDTH = 36


@dataclass(slots=True)
class Told:
    """Count what was printed."""

    answered: int = 0
    unknown: int = 0
    failed: int = 0
    versions: set[int] = field(default_factory=set)

    def add(self, outcome: Outcome) -> None:
        if outcome.prediction is None:
            self.failed += 1
            return
        self.answered += 1
        self.unknown += outcome.prediction.unknown
        self.versions.add(outcome.prediction.version)


class Printer:
    """Prints each outcome as it comes, except as one JSON object, which is printed at the end."""

    def __init__(self, form: str, *, out: TextIO) -> None:
        self._form = form
        self._out = out
        self._kept: list[dict[str, Any]] = []
        self._rows = csv.DictWriter(out, _COLUMNS, lineterminator="\n", extrasaction="ignore")
        if form == "csv":
            self._rows.writeheader()

    def show(self, outcome: Outcome) -> None:
        if self._form == "table":
            print(_line(outcome), file=self._out)
            return
        row = as_json(outcome)
        if self._form == "csv":
            self._rows.writerow({name: _cell(row.get(name)) for name in _COLUMNS})
        elif self._form == "jsonl":
            print(json.dumps(row, allow_nan=False), file=self._out)
        else:
            self._kept.append(row)

    def close(self, told: Told, *, seconds: float) -> None:
        """Print the end: a sentence below a table, or the one JSON object."""
        if self._form == "table":
            print(_summary(told, seconds), file=self._out)
        elif self._form == "json":
            whole = {
                "answered": told.answered,
                "unknown": told.unknown,
                "failed": told.failed,
                "versions": sorted(told.versions),
                "seconds": round(seconds, 3),
                "predictions": self._kept,
            }
            print(json.dumps(whole, allow_nan=False), file=self._out)
        self._out.flush()


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Write an outcome with the names of `POST /predict`, and `file` or `error` beside them."""
    row: dict[str, Any] = {"file": outcome.name}
    prediction = outcome.prediction
    if prediction is None:
        return {**row, "error": str(outcome.error)}
    return {
        **row,
        "label": prediction.label,
        "score": prediction.score,
        "level": prediction.level,
        "task": prediction.task,
        "unknown": prediction.unknown,
        "unknown_score": prediction.unknown_score,
        "version": prediction.version,
        "top": [
            {"label": top_class.label, "score": top_class.score} for top_class in prediction.top
        ],
        **({"id": prediction.id} if prediction.id is not None else {}),
    }


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return csv_cell(value) if isinstance(value, str) else value


def _line(outcome: Outcome) -> str:
    name = printable(outcome.name)
    shown = name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}"
    if outcome.prediction is None:
        return f"{shown:{_NAME_WIDTH}}  failed: {printable(str(outcome.error))}"
    return f"{shown:{_NAME_WIDTH}}  {_told(outcome.prediction)}"


def _told(prediction: Prediction) -> str:
    label = printable(prediction.label)
    if prediction.unknown:
        return f"unknown (closest class: {label})"
    group = "  (a group of classes)" if prediction.level else ""
    return f"{label:{_LABEL_WIDTH}}  {percent(prediction.score):>7}{group}"


def _summary(told: Told, seconds: float) -> str:
    versions = ", ".join(map(str, sorted(told.versions)))
    parts = [
        counted(told.answered, "image") + (f" answered by version {versions}" if versions else ""),
        f"{told.unknown} like no class" if told.unknown else "",
        f"{told.failed} failed" if told.failed else "",
        f"{seconds:.1f} s",
    ]
    return "\n" + ", ".join(part for part in parts if part)


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
_SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".avif",
        ".heic",
        ".heif",
        ".hif",
    ]
)
_SECONDS_BETWEEN_COUNTS = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    return _run(_predict, parser().parse_args(arguments))


def list_models(arguments: Sequence[str] | None = None) -> int:
    """Run `dne models`."""
    return _run(_list_models, models_parser().parse_args(arguments))


def _run(command: Callable[[argparse.Namespace], int], asked: argparse.Namespace) -> int:
    try:
        return command(asked)
    except BadInput as error:
        return _fail(str(error), code=EXIT_USAGE)
    except ClientError as error:
        return _fail(str(error), code=EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted; what is printed is right", code=EXIT_FAILED)


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="dne predict",
        description="Asks a running server about images: files, folders of them, or - for stdin.",
        epilog="A token comes from DNE_TOKEN. Ends with 1 if a file was not answered.",
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="an image, a folder, or -")
    _add_url(made)
    made.add_argument("--model", metavar="NAME", help="ask this model of a server with many")
    made.add_argument("--version", type=_whole, metavar="N", help="ask version N (the served one)")
    made.add_argument("--top-k", type=_whole, metavar="K", help="list K labels (5)")
    made.add_argument("--format", choices=FORMATS, default="table", help="(default: table)")
    made.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on the last line"
    )
    made.add_argument(
        "--connections",
        type=_whole,
        default=CONNECTIONS,
        metavar="N",
        help="requests under way at a time (default: %(default)s)",
    )
    return made


def models_parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="dne models",
        description="Lists the models of a running server with many (dne-serve --models).",
        epilog="A token comes from DNE_TOKEN.",
    )
    made.add_argument("action", choices=("list",), help="list the models that the token may see")
    _add_url(made)
    made.add_argument("--search", default="", metavar="TEXT", help="only names that contain TEXT")
    made.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on the last line"
    )
    return made


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get("DNE_URL") or URL,
        help="the address of the server (default: $DNE_URL, else %(default)s)",
    )


def _list_models(asked: argparse.Namespace) -> int:
    rows: list[ListedModel] = []
    _refuse_no_server(asked.url)
    with Client(asked.url, token=_token()) as client:
        page = client.models(search=asked.search)
        rows += page.models
        while page.next_after is not None:
            page = client.models(search=asked.search, after=page.next_after)
            rows += page.models
    if asked.json:
        print(json.dumps({"models": [asdict(row) for row in rows]}))
        return EXIT_OK
    shown = [["model", "version", "classes", "last use", "state"], *map(_model_line, rows)]
    print(columns(shown))
    print(f"\n{counted(len(rows), 'model')}")
    return EXIT_OK


def _model_line(row: ListedModel) -> list[str]:
    facts = ["" if fact is None else str(fact) for fact in (row.version, row.classes)]
    state = row.error or ("answers" if row.loaded else "not in memory")
    return [row.name, *facts, (row.last_use or "")[:19], state]


def _token() -> str | None:
    return os.environ.get("DNE_TOKEN") or None


def _predict(asked: argparse.Namespace) -> int:
    began = time.monotonic()
    told = Told()
    printer = Printer("json" if asked.json else asked.format, out=sys.stdout)
    images = list(_find_images(asked.files))
    _refuse_no_server(asked.url)
    with Client(asked.url, model=asked.model, token=_token()) as client:
        outcomes = client.predict_many(
            images, top_k=asked.top_k, version=asked.version, connections=asked.connections
        )
        for outcome in _counted(outcomes, total=len(images)):
            told.add(outcome)
            printer.show(outcome)
    printer.close(told, seconds=time.monotonic() - began)
    return EXIT_FAILED if told.failed else EXIT_OK


def _refuse_no_server(url: str) -> None:
    """Raise Unreachable, once for all images, if nobody answers at the address."""
    with Client(url, retries=Retries(attempts=1)) as client:
        try:
            client.ready()
        except Unreachable as error:
            raise Unreachable(
                f"no server at {url} ({error}): start one with `dne-serve`, or name yours with "
                "--url or DNE_URL"
            ) from error
        except ClientError:
            pass  # a server that answers, whatever it says: the images are told


def _find_images(names: Sequence[str]) -> Iterator[Image]:
    """List the images that are asked for: files, and those in folders by their names."""
    for name in names:
        path = Path(name)
        if name == "-":
            yield sys.stdin.buffer.read()
        elif path.is_dir():
            yield from _in_folder(path)
        elif path.exists():
            yield path
        else:
            raise BadInput(f"{name} does not exist")


def _in_folder(folder: Path) -> list[Path]:
    images = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file()
    )
    if not images:
        raise BadInput(f"{folder} holds no images: {', '.join(sorted(_SUFFIXES))}")
    return images


def _counted(outcomes: Iterable[Outcome], *, total: int) -> Iterator[Outcome]:
    """Count on stderr while people look on and results go elsewhere."""
    shown = sys.stderr.isatty() and not sys.stdout.isatty()
    last = 0.0
    for count, outcome in enumerate(outcomes, start=1):
        if shown and (time.monotonic() - last > _SECONDS_BETWEEN_COUNTS or count == total):
            last = time.monotonic()
            print(f"\r{count} of {total} images", end="", file=sys.stderr, flush=True)
        yield outcome
    if shown:
        print(file=sys.stderr)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _fail(message: str, *, code: int) -> int:
    print(f"error: {printable(message)}", file=sys.stderr)
    return code
