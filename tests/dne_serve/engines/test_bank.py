"""The expert bank: every expert once, whichever versions use it. By addresses and sizes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch

from dne_serve.engines.base import finish
from dne_serve.engines.torch_device import Cpu
from dne_serve.engines.torch_engine import MOST_ROOM, BankedVersion, ExpertBank, Held
from model_store.codec import load_network
from model_store.inference.stacks import Stack
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.tiny_versions import IMAGE_SIZE, publish_tiny


@pytest.fixture
def bank() -> ExpertBank:
    return ExpertBank(device=Cpu(max_batch=4))


@pytest.fixture
def lineage(store: Store) -> list[Manifest]:
    """Five versions, each with one task more."""
    return grow(store, 5)


def grow(store: Store, count: int, *, on: Manifest | None = None, seed: int = 0) -> list[Manifest]:
    made = [] if on is None else [on]
    for number in range(count):
        tasks = [(f"t{seed}-{number}", [f"c{seed}-{number}-{i}" for i in range(2)])]
        parent = made[-1] if made else None
        made.append(publish_tiny(store, tasks=tasks, parent=parent, seed=100 * seed + number))
    return made if on is None else made[1:]


def load(bank: ExpertBank, store: Store, manifest: Manifest) -> BankedVersion:
    known = bank.known(manifest)
    refs = manifest.model_shards[len(known) :]
    shards = {ref.sha256: store.read_shard(ref) for ref in refs}
    version = finish(bank.load(manifest, known=known, shards=shards))
    assert not shards  # loading has let go of the bytes
    return version


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(5))


def assert_answers_like(version: BankedVersion, store: Store, manifest: Manifest) -> None:
    with torch.no_grad():
        expected = load_network(store.read_shard, manifest)(images())
    found = version.network(images())
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def stacks(version: BankedVersion) -> list[Stack]:
    return list(dict.fromkeys(held.stack for held in version.experts if held.stack is not None))


def addresses(experts: Sequence[Held]) -> set[int]:
    """Where the tensors of these experts lie."""
    found = set()
    for held in experts:
        if held.first is not None:
            found |= {tensor.data_ptr() for _, tensor in held.first.tensors()}
        if held.stack is not None:
            found |= {block.widen[held.slot].data_ptr() for block in held.stack.blocks}
    return found


def test_versions_of_a_lineage_answer_from_the_same_memory(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    versions = [load(bank, store, manifest) for manifest in lineage]
    for version, manifest in zip(versions, lineage, strict=True):
        assert_answers_like(version, store, manifest)
        assert addresses(version.experts) <= addresses(versions[-1].experts)
    assert len(addresses(versions[-1].experts)) > 0
    assert stacks(versions[-1]) == stacks(versions[1])  # one stack, with one expert after the other


def test_loading_a_shorter_version_after_a_longer_one_takes_no_memory(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    longest = load(bank, store, lineage[-1])
    before = bank.bytes
    shorter = load(bank, store, lineage[2])
    assert bank.bytes == before
    assert [id(one) for one in shorter.experts] == [id(one) for one in longest.experts[:3]]
    assert_answers_like(shorter, store, lineage[2])


def test_a_new_expert_takes_memory_for_itself_and_for_nothing_else(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    older = load(bank, store, lineage[3])
    held = [block.narrow[0].data_ptr() for block in stacks(older)[0].blocks]
    before = bank.bytes
    newest = load(bank, store, lineage[4])
    assert bank.bytes - before <= 1.05 * lineage[4].experts[-1].bytes
    assert [block.narrow[0].data_ptr() for block in stacks(newest)[0].blocks] == held  # had room
    assert_answers_like(older, store, lineage[3])
    assert_answers_like(newest, store, lineage[4])


def test_branches_share_what_comes_before_the_fork(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    branch = grow(store, 2, on=lineage[2], seed=7)
    main, side = load(bank, store, lineage[-1]), load(bank, store, branch[-1])
    assert side.experts[:3] == main.experts[:3]
    assert addresses(main.experts) & addresses(side.experts) == addresses(main.experts[:3])
    assert stacks(side)[0] is stacks(main)[0]
    assert len(stacks(side)) == 2
    assert_answers_like(main, store, lineage[-1])
    assert_answers_like(side, store, branch[-1])
    # The trunk goes on where it was, beside the branch.
    longer = grow(store, 1, on=lineage[-1], seed=8)[0]
    assert_answers_like(load(bank, store, longer), store, longer)
    assert_answers_like(side, store, branch[-1])


@pytest.mark.long
def test_experts_of_several_widths_follow_each_other(bank: ExpertBank, store: Store) -> None:
    parent = None
    for number, heads in enumerate([2, 1, 1, 2, 2, 1]):
        tasks = [(f"t{number}", [f"c{number}"])]
        parent = publish_tiny(store, tasks=tasks, parent=parent, seed=number, heads=heads)
        version = load(bank, store, parent)
        assert_answers_like(version, store, parent)
    assert [(one.heads, one.count) for one in stacks(version)] == [(1, 2), (2, 2), (1, 1)]


def test_a_task_without_an_expert_takes_no_memory_in_the_bank(
    bank: ExpertBank, store: Store
) -> None:
    first = publish_tiny(store, tasks=[("a", ["a1", "a2"])])
    quick = publish_tiny(store, tasks=[("b", ["b1"])], parent=first, seed=1, heads=0)
    deeper = publish_tiny(store, tasks=[("c", ["c1"])], parent=quick, seed=2)
    versions = [load(bank, store, one) for one in (first, quick, deeper)]
    assert bank.experts == 2
    assert versions[1].experts == versions[0].experts
    assert versions[0].covers(versions[1])
    assert versions[2].covers(versions[1])
    for version, manifest in zip(versions, (first, quick, deeper), strict=True):
        assert_answers_like(version, store, manifest)


def test_a_version_with_another_first_expert_stands_beside_the_others(
    bank: ExpertBank, store: Store
) -> None:
    """An adapted first expert shares no pass with the one that it came from."""
    first = publish_tiny(store, tasks=[("a", ["a1", "a2"])])
    adapted = publish_tiny(store, tasks=[("a", ["a1", "a2"])], seed=1)
    quick = publish_tiny(store, tasks=[("b", ["b1"])], parent=adapted, seed=2, heads=0)
    versions = [load(bank, store, one) for one in (first, adapted, quick)]
    assert bank.experts == 2
    assert not versions[1].covers(versions[0])
    assert not versions[0].covers(versions[1])
    assert versions[2].covers(versions[1])
    assert not addresses(versions[0].experts) & addresses(versions[1].experts)
    for version, manifest in zip(versions, (first, adapted, quick), strict=True):
        assert_answers_like(version, store, manifest)


def test_one_version_covers_another_if_it_begins_with_its_experts(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    branch = load(bank, store, grow(store, 1, on=lineage[0], seed=7)[0])
    versions = [load(bank, store, manifest) for manifest in lineage]
    assert versions[4].covers(versions[1])
    assert versions[1].covers(versions[1])
    assert not versions[1].covers(versions[4])
    assert branch.covers(versions[0])
    assert not versions[4].covers(branch)
    assert not branch.covers(versions[1])


def test_experts_that_no_version_uses_leave_and_their_place_is_used_again(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    kept = load(bank, store, lineage[1])
    before = bank.bytes
    longest = load(bank, store, lineage[-1])
    grown_bytes = bank.bytes
    stack = stacks(longest)[0]
    assert stack.count == 4
    del longest
    list(bank.reclaim())
    assert stack.count == 1
    assert before <= bank.bytes < grown_bytes
    other = grow(store, 1, on=lineage[1], seed=7)[0]
    version = load(bank, store, other)
    assert stacks(version) == [stack]
    assert_answers_like(version, store, other)
    assert_answers_like(kept, store, lineage[1])


def test_a_version_that_is_still_in_use_keeps_its_experts_after_it_was_let_go_of(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    under_way = load(bank, store, lineage[2])
    list(bank.reclaim())
    load(bank, store, grow(store, 1, on=lineage[1], seed=7)[0])
    assert_answers_like(under_way, store, lineage[2])


@pytest.mark.long
def test_much_room_is_given_back(bank: ExpertBank, store: Store) -> None:
    lineage = grow(store, 12)
    short, long = load(bank, store, lineage[1]), load(bank, store, lineage[-1])
    (stack,) = stacks(short)
    del long
    list(bank.reclaim())
    columns = stack.blocks[0].narrow[0].shape[1]
    assert columns == (1 + MOST_ROOM) * 32
    assert_answers_like(short, store, lineage[1])
    assert_answers_like(load(bank, store, lineage[-1]), store, lineage[-1])


def test_nothing_stays_when_no_version_is_left(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    version = load(bank, store, lineage[-1])
    version.network(images())
    stack = weakref.ref(stacks(version)[0])
    del version
    list(bank.reclaim())
    assert bank.bytes == 0
    assert bank.known(lineage[-1]) == ()
    assert stack() is None


def test_a_load_that_fails_half_way_leaves_the_others_alone(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    older = load(bank, store, lineage[2])
    known = bank.known(lineage[4])
    shards = {ref.sha256: store.read_shard(ref) for ref in lineage[4].model_shards}
    steps = bank.load(lineage[4], known=known, shards=shards)
    next(steps)
    next(steps)
    assert_answers_like(older, store, lineage[2])  # between two steps
    steps.close()
    assert_answers_like(older, store, lineage[2])
    assert_answers_like(load(bank, store, lineage[4]), store, lineage[4])


def test_the_same_expert_under_other_ancestors_is_another_one(
    bank: ExpertBank, store: Store, lineage: list[Manifest]
) -> None:
    """A digest alone does not say whom an expert reads."""
    first = grow(store, 1, seed=7)[0]
    tasks = (first.tasks[0], *lineage[1].tasks[1:])
    other = lineage[1].model_copy(update={"tasks": tasks})
    version = load(bank, store, lineage[1])
    assert bank.known(other) == ()
    stranger = load(bank, store, other)
    assert not version.covers(stranger)
    assert_answers_like(version, store, lineage[1])
