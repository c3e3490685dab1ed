"""FORMAT.md is kept in step with the code."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from model_store import spec
from model_store.loop.jobs import LEASE_S, MAX_CLAIMS
from model_store.records import channel, inbox, jobs, manifest, quality, sealing
from model_store.store import alternates, shard
from tests.model_store.drafts import prepare

TEXT = files("model_store").joinpath("FORMAT.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([^`]+)`", TEXT))


@pytest.mark.parametrize(
    "model",
    [
        manifest.Manifest,
        manifest.ShardRef,
        manifest.Preprocessing,
        manifest.Geometry,
        manifest.TaskRecord,
        manifest.ClassImages,
        quality.Calibration,
        quality.CalibrationError,
        quality.Unknown,
        quality.Accuracy,
        quality.Metrics,
        quality.Gate,
        quality.ClassChange,
        quality.Confusion,
        quality.Flip,
        sealing.Signature,
        channel.ChannelRecord,
        alternates.StoreRecord,
        alternates.Alternate,
        alternates.Borrower,
        inbox.ItemRecord,
        inbox.KeptPicture,
        inbox.TopClass,
        inbox.LabelRecord,
        inbox.UsedRecord,
        jobs.JobRecord,
        jobs.ClaimRecord,
        jobs.HeartbeatRecord,
        jobs.MadeRecord,
        jobs.CancelRecord,
        jobs.MadeVersion,
        jobs.EndRecord,
    ],
)
def test_every_member_of_every_record_is_described(model: type[sealing.Record]) -> None:
    for name, field in model.model_fields.items():
        assert (field.alias or name) in WORDS


def test_every_tensor_is_described() -> None:
    parent = manifest.decode("x", manifest.encode(prepare().draft, version=1), version=1)
    spec = prepare(parent=parent).draft.spec
    names = [*spec.expert_tensors(0), *spec.expert_tensors(1), *spec.classifier_tensors()]
    names += spec.doubt_tensors()
    for name in names:
        bare = re.sub(r"^experts\.\d+\.((blocks\.\d+|class_block)\.)?", "", name)
        assert re.sub(r"^heads\.\d+", "heads.<t>", bare) in WORDS


def test_the_limits_of_jobs_are_those_of_the_code() -> None:
    assert f"at most {jobs.MAX_LOG_LINES} strings of at most {jobs.MAX_LOG_LINE}" in TEXT
    assert f"older than {LEASE_S:.0f} seconds" in TEXT
    assert f"After claim {MAX_CLAIMS} a job" in TEXT


def test_the_limits_are_those_of_the_code() -> None:
    assert f"at most {sealing.MAX_RECORD_BYTES} bytes" in TEXT
    assert f"last {sealing.DIGEST_FIELD_BYTES} bytes" in TEXT
    assert f"at most 1 MiB and {shard.MAX_TENSORS} tensors" in TEXT
    assert shard.MAX_HEADER_BYTES == 1 << 20
    assert alternates.MAX_SHARD_BYTES == 1 << 34
    assert str(sealing.MAX_VERSION) in TEXT
    assert f"at most {spec.MAX_TASKS} tasks" in TEXT
    text, newline = sealing.SIGNED_AS.decode()[:-1], sealing.SIGNED_AS[-1:]
    assert f"the text `{text}` and a newline ({len(sealing.SIGNED_AS)} bytes)" in TEXT
    assert newline == b"\n"
