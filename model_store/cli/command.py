"""Share between the three commands: options, exit codes, printing of errors and results."""

from __future__ import annotations

import argparse
import getpass
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeAlias, cast

from model_store import __version__
from model_store.command_line import Parser
from model_store.errors import ChannelNotFound, DneError, WrongUsage
from model_store.records.channel import check_channel_name
from model_store.records.manifest import Manifest
from model_store.records.sealing import MAX_VERSION
from model_store.records.signing import NO_KEYS, Keys, load_signer, load_trust
from model_store.store.store import Store
from model_store.tables import Shown

EXIT_OK = 0
EXIT_FAILED = 1
"""Failed or interrupted, or `verify` or `list` found a problem. A version may be published all the
same: an interrupt can come after the publish, and the outcome of a write can be unknown."""
EXIT_USAGE = 2
EXIT_NOT_PROMOTED = 3
"""Published, and not promoted."""

DEFAULT_CHANNEL = "production"

Command = Callable[[argparse.Namespace], int]
Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"


class Add(Protocol):
    """Add a subcommand with the options that all subcommands share."""

    def __call__(self, name: str, command: Command, *, help: str) -> argparse.ArgumentParser: ...


def adder(subparsers: Subparsers, *, store: bool = True) -> Add:
    """Return a function that adds a subcommand with `--json` and, with `store`, `--store`."""

    def add(name: str, command: Command, *, help: str) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(name, help=help, description=help)
        subparser.set_defaults(command=command)
        if store:
            add_store_option(subparser)
        add_json_option(subparser)
        return subparser

    return add


def add_version_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s {__version__}",
        help="print the software's version and end",
    )


def default_store() -> str:
    return os.environ.get("DNE_STORE") or "./models"


def add_store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        metavar="STORE",
        default=default_store(),
        help="where the versions are kept: a directory or s3://bucket/prefix "
        "(default: $DNE_STORE, else ./models)",
    )


def add_alternate_option(parser: argparse.ArgumentParser, *, after: str = "") -> None:
    parser.add_argument(
        "--alternate",
        metavar="STORE",
        action="append",
        default=[],
        help="a store from which a new store is to borrow experts, beside it: both in directories, "
        f"or both in one bucket; may be given several times{after}",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on the last line"
    )


def add_channel_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--channel",
        metavar="C",
        type=_channel_name,
        default=DEFAULT_CHANNEL,
        help="the channel that is meant (default: %(default)s)",
    )


def open_head(options: argparse.Namespace) -> tuple[Store, Manifest]:
    """Open the store, and read the version that the channel names."""
    store = Store.open(options.store)
    head = store.head(options.channel)
    if head is None:
        raise ChannelNotFound(f"channel {options.channel} names no version yet; promote one first")
    return store, store.resolve(head)


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        metavar="FILE",
        type=Path,
        default=os.environ.get("DNE_TRUST") or None,
        help="the file that names who may publish (default: $DNE_TRUST)",
    )


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """Add `--sign` and `--trust`, which `read_keys` reads."""
    parser.add_argument(
        "--sign",
        metavar="KEYFILE",
        type=Path,
        default=os.environ.get("DNE_SIGN_KEY") or None,
        help="sign what is written with this private key (default: $DNE_SIGN_KEY, else do not "
        "sign); needs --trust",
    )
    parser.add_argument(
        "--trust",
        metavar="FILE",
        type=Path,
        help="with --sign: the file that names whose versions and records to stand on "
        "(default: $DNE_TRUST)",
    )


def read_keys(options: argparse.Namespace) -> Keys:
    """Read the key and the trust file before the work begins, so that a wrong file wastes none.
    A key signs only what stands on trusted versions and records, so it needs a trust file."""
    trust = options.trust or os.environ.get("DNE_TRUST")
    if options.sign is None:
        if options.trust is not None:
            raise WrongUsage("--trust says whom a key may build on: give --sign KEYFILE too")
        return NO_KEYS
    if not trust:
        raise WrongUsage(
            "--sign needs --trust FILE or DNE_TRUST: a key signs only what stands on versions and "
            "records that are trusted"
        )
    return Keys(signer=load_signer(options.sign), trust=load_trust(Path(trust)))


def add_reason_option(parser: argparse.ArgumentParser, *, kept: str) -> None:
    """Add `--reason`. `kept` tells the user where the reason is kept."""
    parser.add_argument("--reason", metavar="T", default="", help=f"why; kept {kept}")


def add_version_argument(
    parser: argparse.ArgumentParser, name: str = "number", *, nargs: str | None = None
) -> None:
    """Add a positional argument: the number of a version."""
    what = {"old": "the version to start from", "new": "the version to end at"}
    parser.add_argument(
        name,
        metavar="N" if name == "number" else name.upper(),
        nargs=nargs,
        type=version_number,
        help=what.get(name, "the number of the version"),
    )


def version_number(text: str) -> int:
    """Read the number of a version for argparse."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 8 else 0
    if not 1 <= number <= MAX_VERSION:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a version")
    return number


def current_actor() -> str:
    """Name the user as actor of channel records: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = f"uid-{os.getuid()}"
    return f"{user}@{os.uname().nodename}"


def run(main: Callable[[], int], *, worded: Callable[[str], str] = str) -> int:
    """Run `main` and return its exit code. An error that the user can mend becomes one sentence on
    stderr, as `worded` writes it; any other is a fault of this software and keeps its traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a class may be named in any script
    out, err = cast(TextIO, Shown(sys.stdout)), cast(TextIO, Shown(sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        return _code_of(main, worded)


def _code_of(main: Callable[[], int], worded: Callable[[str], str]) -> int:
    try:
        code = main()
        sys.stdout.flush()
    except WrongUsage as error:
        return _fail(worded(str(error)), code=EXIT_USAGE)
    except DneError as error:
        return _fail(worded(str(error)), code=EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted; the work may be done in part", code=EXIT_FAILED)
    except BrokenPipeError:
        # The reader has gone (`| head`), so there is nobody to tell. Python's own flush at the end
        # must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", code=EXIT_FAILED)
    return code


def print_json(result: Mapping[str, Any]) -> None:
    """Print one object on one line, which must be the last one of stdout."""
    print(json.dumps(result, allow_nan=False))


def show_result(options: argparse.Namespace, facts: Mapping[str, Any], *lines: str) -> int:
    """Print the facts with `--json`, and else these lines. Return the exit code of success."""
    if options.json:
        print_json(facts)
    else:
        print("\n".join(lines))
    return EXIT_OK


def _fail(message: str, *, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _channel_name(text: str) -> str:
    try:
        return check_channel_name(text)
    except WrongUsage as error:
        raise argparse.ArgumentTypeError(str(error)) from error
