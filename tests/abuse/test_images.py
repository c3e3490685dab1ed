"""Images with something wrong in them, by the thousand."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from dne_serve.settings import load_settings
from tests.abuse.mutations import hostile_images, mutations, real_images
from tests.abuse.victim import Answer, Client, Victim
from tests.campaigns import AddRow
from tests.dne_serve.http.test_problems import INSIDES

MUTATIONS = int(os.environ.get("ABUSE_MUTATIONS", "100000"))
CLIENTS = 4
SLACK_BYTES = 200 << 20
EXPECTED = {200, 413, 422}
absent = pytest.mark.skipif(
    not hostile_images(), reason="HOSTILE IMAGES NOT TRIED: they are absent"
)


def sent(victim: Victim, images: list[bytes]) -> list[Answer]:
    with Client(victim) as client:
        return [client.predict(image) for image in images]


def judged(answers: list[Answer]) -> Counter[int]:
    """Statuses, after a look at what was said and how long it took."""
    limit_s = load_settings().fixed.decode_seconds + 5
    for answer in answers:
        assert answer.status in EXPECTED, answer
        assert answer.seconds < limit_s, answer
        assert answer.status == 200 or not INSIDES.search(answer.body.decode()), answer
    return Counter(answer.status for answer in answers)


def spread(statuses: Counter[int]) -> str:
    return ", ".join(f"{count:,} × {status}" for status, count in sorted(statuses.items()))


def test_mutated_images_are_answered_or_refused(victim: Victim) -> None:
    """The short form."""
    statuses = judged(sent(victim, list(mutations(real_images(), count=300, seed=1))))
    assert statuses[200] > 10
    assert statuses[422] > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@absent
def test_hostile_images(victim: Victim, abuse_row: AddRow) -> None:
    files = hostile_images()
    answers = sent(victim, [path.read_bytes() for path in files])
    for path, answer in zip(files, answers, strict=True):
        assert (answer.status == 200) == path.parent.name.startswith("ok-"), (path, answer)
    abuse_row("hostile images", f"{len(files)} files", f"{spread(judged(answers))}; 0 × 5xx")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutations(victim: Victim, abuse_row: AddRow) -> None:
    seeds = [*real_images(), *(path.read_bytes() for path in hostile_images())]
    sent(victim, real_images())
    before = victim.resident_bytes()
    victim.forget_peak()
    share = MUTATIONS // CLIENTS

    def campaign(seed: int) -> tuple[Counter[int], float]:
        slowest, statuses = 0.0, Counter[int]()
        with Client(victim) as client:
            for image in mutations(seeds, count=share, seed=seed):
                answer = client.predict(image)
                statuses += judged([answer])
                slowest = max(slowest, answer.seconds)
        return statuses, slowest

    with ThreadPoolExecutor(CLIENTS) as clients:
        results = list(clients.map(campaign, range(CLIENTS)))
    statuses = sum((one for one, _ in results), Counter[int]())
    grown = victim.peak_bytes() - before
    assert victim.is_alive()
    assert grown < SLACK_BYTES, f"{grown / 2**20:.0f} MiB"
    assert sent(victim, [real_images()[0]])[0].status == 200
    abuse_row(
        "mutated images",
        f"{statuses.total():,} mutations of {len(seeds)} images",
        f"{spread(statuses)}; 0 × 5xx, 0 crashes; slowest {1000 * max(s for _, s in results):.0f} "
        f"ms, memory at most +{grown / 2**20:.0f} MiB",
    )
