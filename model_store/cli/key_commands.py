"""Run `dne-store keys`: make signing keys, and keep the trust file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from model_store.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    Subparsers,
    add_store_option,
    add_trust_option,
    adder,
    print_json,
    show_result,
)
from model_store.errors import StoreError, StoreNotFound, WrongUsage
from model_store.layout import version_name
from model_store.records.signing import (
    Trust,
    check_public_key,
    check_signature,
    load_signer,
    load_trust,
    new_signer,
    save_trust,
)
from model_store.store.store import Store
from model_store.tables import columns

ABOUT = "make signing keys, and say who may publish"


def add_keys_command(commands: Subparsers) -> None:
    keys = commands.add_parser("keys", help=ABOUT, description=ABOUT)
    subparsers = keys.add_subparsers(title="commands", required=True, metavar="COMMAND")

    add = adder(subparsers, store=False)
    new = add("new", _make_key, help="make a private key in a new file and print its public key")
    show = add("show", _show_key, help="print the public key of a private key")
    for subparser in (new, show):
        subparser.add_argument(
            "keyfile", metavar="KEYFILE", type=Path, help="the file of the private key"
        )
    trust = add("trust", _trust_key, help="let the owner of a key publish")
    trust.add_argument("name", metavar="NAME", help="whose key it is; for people to read")
    trust.add_argument("key", metavar="KEY", help="the public key, 64 hexadecimal digits")
    distrust = add("distrust", _distrust_key, help="take a name and its key out of the trust file")
    distrust.add_argument("name", metavar="NAME", help="the name in the trust file")
    listing = add("list", _list_keys, help="list the trusted keys and who signed which version")
    add_store_option(listing)
    for subparser in (trust, distrust, listing):
        add_trust_option(subparser)


def _make_key(options: argparse.Namespace) -> int:
    return _tell_key(options, new_signer(options.keyfile).public)


def _show_key(options: argparse.Namespace) -> int:
    return _tell_key(options, load_signer(options.keyfile).public)


def _trust_key(options: argparse.Namespace) -> int:
    is_new = options.trust is not None and not options.trust.exists()
    known = {} if is_new else load_trust(options.trust).keys
    if options.name in known:
        raise WrongUsage(f"{options.name!r} is trusted already; `dne-store keys distrust` it first")
    trust = Trust({**known, options.name: check_public_key(options.key)})
    return _save(options, trust)


def _distrust_key(options: argparse.Namespace) -> int:
    known = load_trust(options.trust).keys
    if options.name not in known:
        raise WrongUsage(f"{options.name!r} is not in the trust file {options.trust}")
    return _save(options, Trust({name: known[name] for name in known if name != options.name}))


def _list_keys(options: argparse.Namespace) -> int:
    trust = load_trust(options.trust) if options.trust else Trust({})
    versions: dict[str | None, list[int]] = {}
    problems: list[str] = []
    try:
        store = Store.open(options.store)
    except StoreNotFound as error:
        print(f"note: {error}", file=sys.stderr)
    else:
        versions = _versions_by_key(store, problems)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    keys: list[dict[str, Any]] = [
        {"name": trust.name_of(key), "key": key, "versions": versions.get(key, [])}
        for key in dict.fromkeys((*trust.keys.values(), *(key for key in versions if key)))
    ]
    unsigned = versions.get(None, [])
    if options.json:
        print_json({"keys": keys, "unsigned": unsigned, "problems": problems})
        return EXIT_FAILED if problems else EXIT_OK
    rows = [(row["name"] or "(not trusted)", row["key"], _numbers(row["versions"])) for row in keys]
    if unsigned:
        rows.append(("(not signed)", "-", _numbers(unsigned)))
    print(columns([("name", "public key", "versions"), *rows]) if rows else "there are no keys yet")
    return EXIT_FAILED if problems else EXIT_OK


def _versions_by_key(store: Store, problems: list[str]) -> dict[str | None, list[int]]:
    """Sort versions by signing key. A version that cannot be read, or with a signature that does
    not fit, is one more problem."""
    versions: dict[str | None, list[int]] = {}
    for number in store.versions():
        try:
            manifest = store.manifest(number)
            check_signature(manifest, name=version_name(number))
        except StoreError as error:
            problems.append(str(error))
        else:
            key = manifest.signature.key if manifest.signature else None
            versions.setdefault(key, []).append(number)
    return versions


def _numbers(versions: list[int]) -> str:
    return ", ".join(map(str, versions)) or "-"


def _tell_key(options: argparse.Namespace, public: str) -> int:
    return show_result(options, {"keyfile": str(options.keyfile), "key": public}, public)


def _save(options: argparse.Namespace, trust: Trust) -> int:
    save_trust(options.trust, trust)
    facts = {"trust": str(options.trust), "trusted": dict(trust.keys)}
    return show_result(
        options, facts, f"{options.trust} trusts {', '.join(trust.keys) or 'nobody'}"
    )
