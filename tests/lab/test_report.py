"""The report computes its metrics as it says, and shows finished cells only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lab import cli, results
from lab.plan import PLANS, Claim, Planned, steps
from lab.report.metrics import (
    Row,
    courses_of,
    difference,
    metric,
    paired,
    rows_of,
    spread,
    to_joint,
)
from lab.report.page import Part, Report, html, make_report, markdown_table, notes_in
from lab.report.plots import HEIGHT, LINE_HEIGHT, Axis, apart
from lab.report.published import published
from lab.report.tables import Table, Tables
from lab.results import Line
from tests.lab.synthetic import course
from tests.packaging.project import ROOT

BEST = ((0.8,), (0.6, 0.9), (0.5, 0.7, 1.0))
"""Accuracies by task after each of three tasks."""
PLAN = (
    Planned(choice="dne", title="DNE k = 1", seeds=(0, 1)),
    Planned(choice="dne:k=2", title="DNE k = 2"),
    Planned(choice="elsewhere", title="Elsewhere"),
    Planned(choice="dne:tuning=none", title="no tuning", section="Tuning", turn=2),
    Planned(choice="dne", title="DNE, memory=6", section="Memory", setting="memory=6", turn=2),
)


def shifted(by: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(one + by for one in each) for each in BEST)


def lines() -> list[Line]:
    """Make results: two seeds of DNE, two of k = 2, one ablation, one unfinished cell."""
    return [
        *course(*BEST, seed=0),
        *course(*shifted(-0.1), seed=1, order_digest="order 1"),
        *course(*shifted(0.02), seed=0, variant="k=2"),
        *course(*shifted(-0.06), seed=1, variant="k=2", order_digest="order 1"),
        *course(*shifted(-0.2), variant="tuning=none"),
        *course(*shifted(-0.3), setting="memory=6"),
        *course(*BEST[:2], variant="k=4"),
    ]


def rows() -> dict[str, Row]:
    return {row.choice + row.setting: row for row in rows_of(courses_of(lines()))}


def report(some: Sequence[Line] | None = None, **others: str) -> Report:
    found = lines() if some is None else some
    part = Part(preset="mini", lines=found, plan=PLAN)
    return make_report([part], folder="comparisons", **others)


def section(page: str, title: str) -> str:
    return page.partition(f"# {title}\n")[2].partition("\n#")[0]


def test_metrics_are_those_of_a_hand() -> None:
    (found,) = courses_of(course(*BEST))
    assert found.is_finished
    expected = {
        "last": (0.5 + 0.7 + 1.0) / 3,
        "average": (0.8 + 0.75 + 2.2 / 3) / 3,
        "forgetting": ((0.8 - 0.5) + (0.9 - 0.7)) / 2,
        "new_last": 1.0,
        "old_last": 0.6,
        "new_average": (0.9 + 1.0) / 2,
        "old_average": (0.6 + 0.6) / 2,
    }
    assert {name: metric(found, name) for name in expected} == pytest.approx(expected)
    assert found.cpu_s == 180


def test_what_was_learnt_alone_is_averaged_over_later_tasks_where_all_of_them_tell() -> None:
    first, second, third = course(*BEST)
    told = [first, replace(second, new_alone=0.7), replace(third, new_alone=0.9)]
    assert metric(courses_of(told)[0], "new_alone") == pytest.approx(0.8)
    assert metric(courses_of([*told[:2], third])[0], "new_alone") is None


def test_a_method_that_learns_the_last_task_only_has_a_last_accuracy_and_no_average() -> None:
    (found,) = courses_of(course(BEST[-1], first_task=2))
    assert found.is_finished
    assert metric(found, "last") == pytest.approx(2.2 / 3)
    assert metric(found, "old_last") == pytest.approx(0.6)
    assert [metric(found, name) for name in ("average", "forgetting", "new_average")] == [None] * 3


def test_old_classes_count_alike_whatever_the_size_of_their_task() -> None:
    setting = "first=4,step=1"
    (found,) = courses_of(course(*BEST, setting=setting))
    assert found.sizes == (4, 1, 1)
    assert metric(found, "old_last") == pytest.approx((4 * 0.5 + 0.7) / 5)


def test_the_standard_error_is_that_of_the_mean() -> None:
    found = spread([0.1, None, 0.2, 0.6])
    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(0.3), 3)
    assert found.error == pytest.approx((0.14 / 2) ** 0.5 / 3**0.5)
    alone = spread([0.1])
    assert alone is not None
    assert alone.error is None
    assert spread([None]) is None


def test_differences_are_paired_by_seed_and_order() -> None:
    found = paired(rows()["dne:k=2"], rows()["dne"], "last")
    assert found is not None
    assert (found.mean, found.error, found.count) == (pytest.approx(0.03), pytest.approx(0.01), 2)
    other = rows_of(courses_of(course(*BEST, variant="k=7", order_digest="another order")))
    assert paired(other[0], rows()["dne"], "last") is None


def test_d_is_measured_from_joint_on_the_same_backbone() -> None:
    row = rows()["dne"]
    joint = Row(
        method="joint",
        variant="",
        setting="",
        backbone="transformer",
        base=None,
        courses=tuple(courses_of(course((0.9, 0.9, 0.9), first_task=2, method="joint"))),
    )
    assert to_joint(row, [row, joint]) == pytest.approx(2.2 / 3 - 0.05 - 0.9)
    assert to_joint(row, [row]) is None


def test_of_two_lines_of_one_task_the_later_one_counts() -> None:
    (found,) = courses_of([*course(*shifted(-0.4)), *course(*BEST)])
    assert metric(found, "last") == pytest.approx(2.2 / 3)


def test_the_best_row_comes_first_with_its_standard_error() -> None:
    table = Tables(rows=list(rows().values()), plan=PLAN).same_backbone()
    assert [(row[0], row[1]) for row in table.rows] == [
        ("DNE k = 2", "71.3 ± 4.0"),
        ("DNE k = 1", "68.3 ± 5.0"),
    ]


def bits(right: int, *, of: int = 100) -> str:
    return np.packbits(np.arange(of) < right).tobytes().hex()


def last(method: str, right: int, *, seed: int = 0) -> list[Line]:
    """Make the last line of a cell that answers so many of 100 images right."""
    share = (right / 100,) * 3
    return course(share, first_task=2, method=method, seed=seed, right=bits(right))


def test_a_claim_is_shown_where_its_difference_exceeds_two_errors_and_what_was_asked() -> None:
    made = [*last("dne", 80), *last("replay", 60), *last("lda", 78)]
    plan = [Planned(choice=name, title=name) for name in ("dne", "replay", "lda", "ncm")]
    tables = Tables(rows=rows_of(courses_of(made)), plan=plan)
    claims = [
        Claim(choice="dne", above="replay"),
        Claim(choice="dne", above="replay", least=30.0),
        Claim(choice="dne", above="lda"),
        Claim(choice="dne", above="ncm"),
    ]
    # Answers to 20 of 104 bits differ, so the error over images is 3.9 points.
    assert [(one[2], one[-1]) for one in tables.claims(claims).rows] == [
        ("+20.0 ± 3.9", "shown"),
        ("+20.0 ± 3.9", "**not shown**"),
        ("+2.0 ± 1.3", "**not shown**"),
        ("–", "not run"),
    ]


def test_the_error_of_a_difference_is_that_over_seeds_where_it_is_larger() -> None:
    made = [
        *(last("dne", 90) + last("replay", 50)),
        *(last("dne", 50, seed=1) + last("replay", 50, seed=1)),
    ]
    ours, other = rows_of(courses_of(made))
    found = difference(ours, other)
    assert found is not None
    assert (found.mean, found.error) == (pytest.approx(0.2), pytest.approx(0.2))


def test_parts_of_one_page_are_told_apart_without_those_that_are_superseded() -> None:
    learnt = Part(preset="signs", lines=course(*BEST, preset="signs"), plan=PLAN)
    before = Part(preset="short", lines=course(*BEST, preset="short"), plan=PLAN)
    empty = Part.of("converged", [])
    page = make_report([empty, learnt, before], folder="x").markdown
    titles = re.findall(r"^## (.*)$", page, flags=re.MULTILINE)
    assert titles[4:] == [
        "From random weights: `converged`",
        "On a pre-trained start: `signs`",
        "Origin",
    ]
    assert "| DNE k = 1 above adapter | > 2 errors | – | 0 | not run |" in page
    assert "| DNE k = 4 above replay | > 2 errors | – | 0 | not run |" in page
    assert "No cell is finished." in page
    assert page.count("What is missing") == 2


def test_unfinished_cells_are_listed_and_not_shown_in_tables() -> None:
    page = report().markdown
    missing = section(page, "What is missing")
    assert "- `dne:k=4`, seed 0: 2 of 3 tasks" in missing
    assert "- seed 0, 1: Elsewhere" in missing
    assert "- seed 1: no tuning; " in missing
    assert "DNE k = 1" not in missing
    assert "k=4" not in page.replace(missing, "")


def test_ablations_stand_beside_the_reference() -> None:
    page = report().markdown
    tuning, memory = section(page, "Tuning"), section(page, "Memory")
    assert re.search(r"\| no tuning \| 53\.3 .* −20\.0 \|", tuning)
    assert "| DNE k = 1 | 68.3 ± 5.0 |" in tuning
    assert re.search(r"\| DNE, memory=6 \| 43\.3 .* −30\.0 \|", memory)
    unplanned = [*lines(), *course(*BEST, variant="decay=authors")]
    others = section(report(unplanned).markdown, "Other variants and settings")
    assert "| dne:decay=authors | 73.3 |" in others
    assert "no tuning" not in others


def test_who_attends_to_whom_is_shown_where_a_variant_tells() -> None:
    assert "Who attends to whom" not in report().markdown
    told = course(*BEST, variant="network=sta-both,attention=plain")
    told[-1] = replace(told[-1], attention={"SPSH": (0.25, 0.004), "DPDH": (0.75, 0.0125)})
    shown = section(report([*lines(), *told]).markdown, "Who attends to whom")
    assert "| SPSH, share | DPDH, share | SPSH, mean of a pair | DPDH, mean of a pair |" in shown
    assert "| 25.0 | 75.0 | 0.400 | 1.250 |" in shown


def test_the_papers_figures_are_found_for_the_rows_that_it_has() -> None:
    found = published("dne", "k=4", "transformer")
    assert found is not None
    assert (found.last, found.average, found.gflop) == (70.04, 74.86, 4.02)
    joints = [published("joint", "backbone=resnet-18", one) for one in ("transformer", "ResNet-18")]
    assert [one.last for one in joints if one] == [76.12, 80.41]
    assert published("icarl", "backbone=transformer", "transformer") == published("icarl", "", "?")
    assert published("dne", "tuning=none", "transformer") is None


def test_notes_are_included_and_html_in_them_is_shown_as_text() -> None:
    made = report(notes="**DER first**: checked <script>alert(1)</script>\n")
    assert "**DER first**" in section(made.markdown, "Where the order differs from the paper's")
    page = html(made)
    assert "<strong>DER first</strong>" in page
    assert "<script" not in page


def test_the_page_holds_its_plots_and_asks_for_no_other_file() -> None:
    made = report()
    page = html(made)
    names = {one.name for one in made.figures}
    drawn = {"accuracy-transformer", "cost", "growth-parameters", "growth-flop"}
    assert names == {f"mini-{one}" for one in drawn}
    assert page.count("<svg") == 4
    assert "<img" not in page
    for one in made.figures:
        assert f"(comparisons/{one.name}.svg)" in made.markdown
        assert ElementTree.fromstring(one.svg).tag.endswith("svg")
        assert "prefers-color-scheme" in one.svg
        assert "NaN" not in one.svg


def test_a_report_without_finished_cells_says_so() -> None:
    made = report(course(BEST[0]))
    assert "No cell is finished." in made.markdown
    assert made.figures == ()


def test_bars_in_a_name_do_not_break_a_table() -> None:
    table = Table(titles=("method", "LA"), rows=(("a|b", "1"),))
    assert markdown_table(table).splitlines()[2] == "| a\\|b | 1 |"


def test_names_at_the_ends_of_lines_do_not_overlap() -> None:
    for wanted in ([40.0] * 12, [300.0, 301.0, 350.0, 355.0], [50.0, 200.0]):
        found = apart(wanted)
        gaps = [after - before for before, after in pairwise(found)]
        assert min(gaps) >= LINE_HEIGHT - 1e-9
        assert max(found) <= HEIGHT
    assert apart([50.0, 200.0]) == [50.0, 200.0]


@pytest.mark.parametrize("values", [[0.2, 0.9], [5.0], [0.0], [-3.0, 1e-3], [1e9, 3.1e9]])
def test_an_axis_has_round_ticks_around_all_values(values: list[float]) -> None:
    axis = Axis.around(values)
    assert axis.ticks[0] <= min(values) <= max(values) <= axis.ticks[-1]
    assert 2 <= len(axis.ticks) <= 8
    positive = [abs(value) + 0.1 for value in values]
    share = [Axis.logarithm(positive).share(value) for value in positive]
    assert all(0 < one < 1 for one in share)


def test_the_plan_knows_what_is_done_and_how_long_the_rest_takes() -> None:
    found = {
        (one.planned.title, one.seed): (one.state, one.minutes)
        for one in steps(lines(), preset="mini", plan=PLAN)
    }
    assert found[("DNE k = 1", 1)] == ("done", 0.0)
    assert found[("Elsewhere", 0)] == ("unknown", None)
    assert found[("no tuning", 1)] == ("missing", 2.0)  # the first task is learnt already
    assert found[("DNE, memory=6", 1)] == ("missing", 2.0)


def test_the_plan_runs_all_systems_of_a_seed_before_the_next_seed_and_ablations_last() -> None:
    order = [(one.planned.title, one.seed) for one in steps([], preset="mini", plan=PLAN)]
    assert order[:4] == [("DNE k = 1", 0), ("DNE k = 2", 0), ("Elsewhere", 0), ("DNE k = 1", 1)]
    assert [title for title, _ in order[6:]] == ["no tuning", "DNE, memory=6"] * 2
    unfinished = steps(course(BEST[0]), preset="mini", plan=PLAN)[0]
    assert (unfinished.state, unfinished.minutes) == ("unfinished", None)


def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    """Compare what `python -m lab report` writes; run it after a change of results or plan."""
    parts = []
    for preset in PLANS:
        path = ROOT / cli.RESULTS / f"{preset}.jsonl"
        parts.append(Part.of(preset, results.read([path] if path.exists() else [], note=print)))
    notes = notes_in((ROOT / cli.NOTES).read_text())
    made = make_report(parts, folder=cli.PAGE.stem, notes=notes)
    assert (ROOT / cli.PAGE).read_text() == made.markdown, "run `python -m lab report`"
