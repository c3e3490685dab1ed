from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from dne_serve.errors import NotEnoughMemory
from dne_serve.rollout import memory
from dne_serve.rollout.memory import COPIES, MemoryCheck, give_back
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, png, wait_for
from tests.tiny_versions import promote, publish_tiny


def size(*manifests: Manifest) -> int:
    shards = {ref.sha256: ref.bytes for one in manifests for ref in one.model_shards}
    return sum(shards.values())


def test_a_version_that_fits_is_let_pass_and_one_that_does_not_is_not(letters: Manifest) -> None:
    needed = COPIES * size(letters)
    MemoryCheck(list, available=lambda: needed).check(letters)
    MemoryCheck(list, available=lambda: None).check(letters)
    with pytest.raises(NotEnoughMemory, match=r"version 1 needs about .* MiB"):
        MemoryCheck(list, available=lambda: needed - 1).check(letters)


def test_what_is_in_memory_need_not_fit_again(letters: Manifest, digits: Manifest) -> None:
    new = COPIES * (size(letters, digits) - size(letters))
    assert new < COPIES * size(digits)
    MemoryCheck(lambda: [letters], available=lambda: new).check(digits)
    MemoryCheck(lambda: [digits], available=lambda: 0).check(digits)
    with pytest.raises(NotEnoughMemory):
        MemoryCheck(lambda: [letters], available=lambda: new - 1).check(digits)


def test_a_pass_counts_where_it_takes_more_than_those_of_versions_in_memory(
    letters: Manifest, digits: Manifest
) -> None:
    def pass_bytes(spec: NetworkSpec) -> int:
        return 1000 * len(spec.tasks)

    alone = MemoryCheck(list, pass_bytes=pass_bytes, available=lambda: COPIES * size(digits) + 1999)
    with pytest.raises(NotEnoughMemory, match="more for a batch of images"):
        alone.check(digits)
    new = COPIES * (size(letters, digits) - size(letters))
    beside = MemoryCheck(lambda: [letters], pass_bytes=pass_bytes, available=lambda: new + 1000)
    beside.check(digits)
    back = MemoryCheck(lambda: [digits], pass_bytes=pass_bytes, available=lambda: new)
    back.check(letters)  # an older version never takes more than the one that is there


def test_a_load_that_would_not_fit_leaves_the_served_version_alone(
    live: Live, store: Store, digits: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.serving.shared.memory, "_available", lambda: 1000)
    promote(store, publish_tiny(store, tasks=[("x", ["x"])], parent=digits, seed=3))
    wait_for(lambda: live.http.get("/readyz").json()["error"] is not None)
    ready = live.http.get("/readyz").json()
    assert (ready["version"], "memory" in ready["error"]) == (2, True)
    assert live.predict(png()).json()["version"] == 2
    assert_problem(live.predict(png(), query="?version=3"), 503, says="memory")
    assert live.metric("dne_failed_loads_total") >= 1
    assert live.metric("dne_following") == 0
    monkeypatch.setattr(live.serving.shared.memory, "_available", lambda: 1 << 40)
    live.wait_until_serving(3)  # it is tried again


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert memory._of_cgroup(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._of_cgroup(tmp_path) is None
    assert memory._of_cgroup(tmp_path / "absent") is None


def test_a_machine_has_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2 kB\n")
    assert memory._of_machine(tmp_path / "meminfo") == 2048
    assert memory._of_machine(tmp_path / "absent") is None
    assert (memory.available_bytes() or 1) > 0


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library cannot give memory back"
)
def test_what_was_freed_between_what_is_in_use_goes_back_to_the_system() -> None:
    def resident_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

    blocks = [bytearray(100_000) for _ in range(2_000)]
    full = resident_kib()
    kept = blocks[::100]  # here and there, so that the heap cannot shrink
    del blocks
    give_back()
    assert resident_kib() < full - 150_000
    assert len(kept) == 20
