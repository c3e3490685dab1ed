"""Requests made up from the OpenAPI document by schemathesis, with and without tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dne_serve.access.permission import new_token
from model_store.store.store import Store
from tests.abuse.victim import Victim, serving
from tests.campaigns import AddRow
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.trained_store import TrainedStore

pytest.importorskip("schemathesis", reason="THE OPENAPI DOCUMENT WAS NOT TRIED: no schemathesis")

# A version that is not served yet is rightly answered with 503.
# A list that is too long is refused as too large (413), which schemathesis does not expect.
SERVED = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
[parameters]
"header.Dne-At-Least" = "1"
"""
# Of all names that a path may hold, this one leads on; others are tried where it is not given.
CONFIG = f'{SERVED}"path.model" = "dne"\n'
UNLOAD = "/v2/repository/models/{model}/unload"
# Bytes that fit the schema of an upload need not be an image, so they may be refused.
UNFIT = "positive_data_acceptance"
# The configuration replaces a version that is made up to be wrong, and the request is right again.
UNFIT_WITH_A_VERSION = f"{UNFIT},negative_data_rejection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    generated: int
    operations: int


def fuzzed(
    victim: Victim, folder: Path, *options: str, token: str | None = None, unfit: str = UNFIT
) -> Run:
    """Every check of every operation; what it finds fails the test. One worker: with two,
    CPython 3.11 may fail while hypothesis looks at sources ("AST constructor recursion")."""
    report = folder / "report.json"
    header = ["--header", f"Authorization: Bearer {token}"] if token else []
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{victim.url}/openapi.json",
         "--checks", "all", "--exclude-checks", unfit, "--seed", "1", "--no-color",
         "--suppress-health-check", "all", "--request-timeout", "30",
         "--report", "json", "--report-json-path", str(report), *header, *options],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    result = json.loads(report.read_text())
    assert victim.is_alive()
    return Run(
        generated=result["test_cases"]["generated"], operations=result["operations"]["tested"]
    )


def server_errors(victim: Victim, token: str | None = None) -> float:
    """Answers of 5xx by the server's own count."""
    header = {"Authorization": f"Bearer {token}"} if token else {}
    text = httpx.get(f"{victim.url}/metrics", headers=header).text
    lines = [line for line in text.splitlines() if line.startswith("dne_requests_total")]
    assert lines
    return sum(float(line.split()[-1]) for line in lines if 'status="5' in line)


@pytest.mark.long
def test_made_up_requests_find_nothing(victim: Victim, tmp_path: Path) -> None:
    """The short form: what the schema's own limits suggest, and nothing at random."""
    before = server_errors(victim)
    assert fuzzed(victim, tmp_path, "--phases", "coverage", "--max-examples", "5").generated > 100
    assert server_errors(victim) == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("doors", ["open", "closed"])
@pytest.mark.parametrize("sends", ["no token", "a token"])
def test_schema_campaign(tmp_path: Path, abuse_row: AddRow, doors: str, sends: str) -> None:
    store = Store.create(str(tmp_path / "models"))
    publish_digits(store, publish_letters(store))
    scopes = "admin" if doors == "open" else "predict,read,admin"
    made = new_token(f"tests={scopes}")
    token = made.secret if sends == "a token" else None
    (tmp_path / "tokens").write_text(made.line)
    given = ("--store", store.location, "--token-file", str(tmp_path / "tokens"))
    with serving(*given) as victim:
        (tmp_path / "schemathesis.toml").write_text(CONFIG if token else SERVED)
        before = server_errors(victim, made.secret)  # it was asked whether it is ready
        # Unloading comes last and alone: after it 503 is the right answer to nearly everything.
        runs = [
            fuzzed(victim, tmp_path, "--max-examples", "100", *chosen, token=token)
            for chosen in (("--exclude-path", UNLOAD), ("--include-path", UNLOAD))
        ]
        assert server_errors(victim, made.secret) == before
    generated, operations = (
        sum(getattr(run, name) for run in runs) for name in ("generated", "operations")
    )
    abuse_row(
        f"schemathesis, {doors} routes",
        f"{generated:,} requests to {operations} operations, with {sends}",
        "0 × 5xx, 0 undocumented statuses, 0 other findings",
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_schema_campaign_on_versions_that_the_trainer_made(
    trained_copy: TrainedStore, tmp_path: Path, abuse_row: AddRow
) -> None:
    """Each kind of version is named wherever a version can be named."""
    made = new_token("tests=admin")
    kinds = ("refused", "renaming", "extension", "branch", "served")
    location = str(trained_copy.location)
    (tmp_path / "tokens").write_text(made.line)
    given = ("--store", location, "--token-file", str(tmp_path / "tokens"))
    with serving(*given) as victim:
        before = server_errors(victim, made.secret)
        runs = [
            fuzzed_with(victim, tmp_path / kind, getattr(trained_copy, kind), token=made.secret)
            for kind in kinds
        ]
        assert server_errors(victim, made.secret) == before
    generated = sum(run.generated for run in runs)
    abuse_row(
        "schemathesis, trained store",
        f"{generated:,} requests to {runs[0].operations} operations, {len(kinds)} kinds of version",
        "0 × 5xx, 0 undocumented statuses, 0 other findings",
    )


def fuzzed_with(victim: Victim, folder: Path, version: int, *, token: str) -> Run:
    folder.mkdir()
    named = f'"path.version" = {version}\n"query.version" = {version}\n'
    (folder / "schemathesis.toml").write_text(CONFIG + named)
    chosen = ("--max-examples", "20", "--exclude-path", UNLOAD)
    return fuzzed(victim, folder, *chosen, token=token, unfit=UNFIT_WITH_A_VERSION)
