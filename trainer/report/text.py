"""Print outcomes and evaluations as sentences, and the commands that a person may want next."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import Any

from model_store.cli.command import DEFAULT_CHANNEL, default_store
from model_store.records.describe import verdict
from model_store.records.quality import Calibration, Gate, Unknown
from model_store.report.advice import lines as advice_lines
from model_store.tables import counted, likely_range, percent, printable
from trainer.backbones.known import FIRST
from trainer.evaluation.unknown import is_few
from trainer.versions.outcome import Outcome

_MAX_LINES = 10
_POOR = 0.7
"""The share of right answers below which a version is called poor."""


def tell_outcome(outcome: Outcome) -> None:
    facts, manifest = outcome.as_json(), outcome.manifest
    print(
        f"version {facts['version']}: {counted(facts['tasks'], 'task')}, "
        f"{counted(facts['classes'], 'class', 'classes')}; "
        f"delta {_mib(facts['delta_bytes'])} of {_mib(facts['total_bytes'])}, "
        f"images kept {_mib(facts['memory_bytes'])}, {facts['seconds']:.0f} s"
    )
    _tell_accuracy(facts["accuracy"])
    _tell_calibration(manifest.calibration)
    _tell_detector(manifest.unknown)
    gate = manifest.metrics.gate
    for note in gate.notes if gate else ():
        print(note)
    if gate and not gate.passed:
        _tell_what_got_worse(gate)
    if outcome.refused:
        print(f"not promoted: {outcome.refused}", file=sys.stderr)
    elif not outcome.promoted:
        print("published and, as asked, not promoted")
    elif gate and gate.forced:
        print(f"promoted by force, against the gate: {'; '.join(gate.reasons)}", file=sys.stderr)
    if gate and gate.passed:
        print(f"the gate: {verdict(manifest)}")
    tell_poor(outcome)
    advice = outcome.advice
    if advice and outcome.deeper is None and (advice.classes or advice.copies):
        print("what would help most:")
        for line in advice_lines(advice):
            print(f"  {printable(line.text)}")
    if outcome.deeper is not None:
        print("adapted:" if outcome.deeper.manifest.adapted else "with an expert:")
        tell_outcome(outcome.deeper)


def tell_evaluation(report: dict[str, Any]) -> None:
    print(f"version {report['version']}, {counted(report['images'], 'image')}")
    for name, value in report["accuracy"].items():
        print(f"  accuracy, {name + ':':4} {percent(value)}")
    calibration = report["calibration"]
    print(
        f"  calibration error: {report['calibration_error']:.3f} (with temperature "
        f"{calibration['temperature']:.2f}; without: {calibration['before']['all']:.3f}; by chance "
        f"alone, with so few images: {calibration['chance']:.3f})"
    )
    if levels := report["levels"]:
        print(
            f"  answered by a group: {percent(levels['answered_by_groups'])}, right "
            f"{percent(levels['right_of_these'])}; right at any level: "
            f"{percent(levels['right_at_any_level'])}"
        )
    unknown = report["unknown"]
    print(f"  known images answered as unknown: {percent(unknown['refused_known'])}")
    if unknown["images"]:
        print(
            f"  unknown images ({unknown['images']}): AUROC {unknown['auroc']:.3f}, answered as "
            f"known {percent(unknown['false_accept_rate'])}"
        )
    width = max(map(len, report["per_class"]))
    for name, value in report["per_class"].items():
        print(f"    {name:{width}}  {percent(value)}")


def _tell_accuracy(accuracy: dict[str, float | None]) -> None:
    if accuracy["all"] is None:
        return
    old = f", old {percent(accuracy['old'])}" if accuracy["old"] is not None else ""
    before = accuracy["parent_old"]
    was = f" (before: {percent(before)})" if before is not None else ""
    print(f"accuracy: all {percent(accuracy['all'])}{old}{was}, new {percent(accuracy['new'])}")


def tell_poor(outcome: Outcome) -> None:
    """Say that a version is poor, whatever the gate says: it compares, and does not know what is
    good enough."""
    accuracy, spec = outcome.as_json()["accuracy"]["all"], outcome.manifest.spec
    if accuracy is None or accuracy >= _POOR:
        return
    print(f"this version is poor: {percent(1 - accuracy)} of the images it was judged by are wrong")
    if not spec.is_pretrained:
        print(
            "  without a pre-trained start it also takes most things that it was never shown for "
            f"one of its classes: begin a new store with --pretrained {FIRST.shown}"
        )


def _tell_calibration(calibration: Calibration) -> None:
    before, after = calibration.before.all, calibration.after.all
    if before is not None and after is not None:
        print(
            f"calibration error {before:.3f}, {after:.3f} with temperature "
            f"{calibration.temperature:.2f} ({counted(calibration.images, 'image')})"
        )


def _tell_detector(unknown: Unknown | None) -> None:
    if unknown is None:
        print("no image is ever answered as unknown: nothing was held out to set the threshold by")
    elif is_few(unknown.images, rate=unknown.rate):
        share = max(unknown.rate, 1 / (unknown.images + 1))
        low, high = likely_range(share, unknown.images)
        print(
            f"only {counted(unknown.images, 'image')} set the threshold for unknown images: about "
            f"{percent(share)} of known images will be answered as unknown, and {percent(low)} to "
            f"{percent(high)} are likely"
        )


def _tell_what_got_worse(gate: Gate) -> None:
    worse = [
        f"{change.class_name}: {percent(change.before)} before, {percent(change.after)} now "
        f"({counted(change.images, 'image')})"
        for change in gate.worse
    ]
    confused = [
        f"{pair.class_name} taken for {pair.taken_for}: {pair.count}" for pair in gate.confused
    ]
    flipped = [
        f"{flip.class_name}, answered {flip.before} before and {flip.after} now: {flip.count}"
        for flip in gate.flipped
    ]
    for what, lines in (("got worse", worse), ("confused", confused), ("flipped", flipped)):
        for line in lines[:_MAX_LINES]:
            print(f"  {what}: {line}")
        if len(lines) > _MAX_LINES:
            print(f"  {what}: {len(lines) - _MAX_LINES} more, in `dne-store show --json`")


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.2f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The last lines for a person, whose commands reach the same channel of the same store."""

    outcome: Outcome
    store: str
    channel: str

    def tell(self) -> None:
        print(self._served())
        print("next:")
        rows = self._commands()
        width = max(len(command) for command, _ in rows)
        for command, purpose in rows:
            print(f"  {printable(command):{width}}  {purpose}")

    @property
    def _last(self) -> Outcome:
        return self.outcome.deeper or self.outcome

    def _served(self) -> str:
        last, version = self._last, self._last.manifest.version
        if last.promoted:
            return f"served: version {version}; running servers load it by themselves"
        if last.served is None:
            return f"served: nothing yet; version {version} is published and not promoted"
        return f"served: version {last.served}, as before; version {version} is published beside it"

    def _commands(self) -> list[tuple[str, str]]:
        version, parent = self._last.manifest.version, self._last.manifest.parent
        if not self._last.promoted:
            return [
                (f"dne-store show {version}{self._in_store}", "the version, and its verdict"),
                (f"dne-store promote {version}{self._in_channel}", "serve it all the same"),
            ]
        more = (f"dne-train add-task --data FOLDER{self._in_channel}", "teach more classes")
        if parent is None:
            return [(f"dne-serve{self._in_channel}", "answer requests over HTTP"), more]
        return [more, (f"dne-store rollback{self._in_channel}", f"go back to version {parent}")]

    @property
    def _in_store(self) -> str:
        return f" --store {shlex.quote(self.store)}" if self.store != default_store() else ""

    @property
    def _in_channel(self) -> str:
        named = f" --channel {shlex.quote(self.channel)}"
        return self._in_store + (named if self.channel != DEFAULT_CHANNEL else "")
