"""A lone image has all threads; batches share them."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import numpy as np
import pytest

from dne_serve.engines.candidates import ThreadPlan, UnderWay
from dne_serve.engines.onnx_engine import HeldLineage

LONG_S = 10.0


@pytest.mark.parametrize(
    ("threads", "workers", "found"),
    [
        (1, None, (1, 1, 1)),
        (2, None, (2, 2, 1)),
        (8, None, (8, 2, 4)),
        (8, 1, (8, 1, 8)),
        (2, 4, (2, 4, 1)),
        (7, 2, (7, 2, 3)),
    ],
)
def test_threads_are_shared_among_workers(
    threads: int, workers: int | None, found: tuple[int, int, int]
) -> None:
    plan = ThreadPlan.of(threads=threads, workers=workers)
    assert (plan.threads, plan.workers, plan.share) == found


def test_without_a_word_all_cores_of_this_process_are_used() -> None:
    assert ThreadPlan.of(threads=None, workers=None).threads == len(os.sched_getaffinity(0))


def test_a_system_that_tells_no_affinity_has_all_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert ThreadPlan.of(threads=None, workers=None).threads == 6


def test_a_pass_that_begins_beside_another_takes_its_share() -> None:
    inside, leave = threading.Event(), threading.Event()
    ran: list[str] = []

    def alone(images: object) -> object:
        ran.append("alone")
        inside.set()
        assert leave.wait(LONG_S)
        return images

    def beside(images: object) -> object:
        ran.append("beside")
        return images

    images = np.zeros((1, 3, 2, 2), dtype=np.float32)
    lineage = HeldLineage(experts=(), alone=alone, beside=beside, under_way=UnderWay())  # type: ignore[arg-type]
    first = threading.Thread(target=lineage.token, args=(images,))
    first.start()
    assert inside.wait(LONG_S)
    lineage.token(images)
    leave.set()
    first.join()
    lineage.token(images)
    lineage.token(np.concatenate([images, images]))
    assert ran == ["alone", "beside", "alone", "beside"]


def test_a_pass_that_fails_is_no_longer_under_way() -> None:
    under_way = UnderWay()
    with suppress(ValueError), under_way.one():
        raise ValueError("no")
    with under_way.one() as alone:
        assert alone
