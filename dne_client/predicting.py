"""Run `dne predict`: ask a server about files and folders, and print a table, JSON or CSV."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dne_client.answers import Outcome
from dne_client.clients import CONNECTIONS, URL, Client
from dne_client.errors import BadInput, ClientError
from dne_client.images import Image
from dne_client.printing import FORMATS, Printer, Told

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
SECONDS_BETWEEN_COUNTS = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        return _predict(asked)
    except BadInput as error:
        return _fail(str(error), code=EXIT_USAGE)
    except ClientError as error:
        return _fail(str(error), code=EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted; what is printed is right", code=EXIT_FAILED)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="dne predict",
        description="Asks a running server about images: files, folders of them, or - for stdin.",
        epilog="A token comes from DNE_TOKEN. Ends with 1 if a file was not answered.",
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="an image, a folder, or -")
    made.add_argument(
        "--url",
        default=os.environ.get("DNE_URL") or URL,
        help="the address of the server (default: $DNE_URL, else %(default)s)",
    )
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


def _predict(asked: argparse.Namespace) -> int:
    began = time.monotonic()
    told = Told()
    printer = Printer("json" if asked.json else asked.format, out=sys.stdout)
    images = list(find_images(asked.files))
    with Client(asked.url, token=os.environ.get("DNE_TOKEN") or None) as client:
        found = client.predict_many(
            images, top_k=asked.top_k, version=asked.version, connections=asked.connections
        )
        for outcome in _counted(found, total=len(images)):
            told.add(outcome)
            printer.show(outcome)
    printer.close(told, seconds=time.monotonic() - began)
    return EXIT_FAILED if told.failed else EXIT_OK


def find_images(names: Sequence[str]) -> Iterator[Image]:
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
    found = sorted(
        one for one in folder.rglob("*") if one.suffix.lower() in SUFFIXES and one.is_file()
    )
    if not found:
        raise BadInput(f"{folder} holds no images: {', '.join(sorted(SUFFIXES))}")
    return found


def _counted(outcomes: Iterable[Outcome], *, total: int) -> Iterator[Outcome]:
    """Count on stderr while people look on and results go elsewhere."""
    shown = sys.stderr.isatty() and not sys.stdout.isatty()
    last = 0.0
    for count, outcome in enumerate(outcomes, start=1):
        if shown and (time.monotonic() - last > SECONDS_BETWEEN_COUNTS or count == total):
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
    print(f"error: {message}", file=sys.stderr)
    return code
