"""Hold the sentences of the report that do not depend on results."""

from __future__ import annotations

INTRODUCTION = """\
All methods of a part share one [harness](lab.md): order of classes, images, memory, augmentation, \
epochs and counting. `python -m lab report` writes this page from `lab/results`."""

METRICS = """\
- **LA** is the accuracy of all classes after the last task, in per cent. **AA** is its average \
over the tasks.
- **D** is LA minus the LA of Joint, which learns all classes at once, on the same backbone.
- **F** is the cost of an answer to one image, in GFLOP; a multiply-add counts as two. *Served* is \
the cost in the form that the server runs.
- **new** and **old** are the accuracies of the newest task's classes and of all earlier ones, \
among all classes so far. *All tasks* is the average over the tasks after the first.
- **new, alone** is the accuracy of the newest task's classes among themselves, over the tasks \
after the first.
- **forgetting** is the average over the old tasks of the best minus the last accuracy.
- **IA** is independent attention: DNE whose experts read their own channels only.
- **passes** are those through a backbone for an answer. ± is the standard error over seeds.
- *The paper's* figures are not comparable: compare orders only."""

SAME_BACKBONE = "All rows use the transformer. Seeds, costs and the paper's figures follow below."

MATCHED_COST = """\
Each method has the backbone that it was published on, or the one named; the cheapest answer comes \
first. CPU minutes are those of learning all tasks; "≥" marks cells that were stopped and went on, \
which count their last run only."""

DIFFERENCES = """\
A row minus DNE k = 1, in points, on the same orders of classes. "The same" first task means the \
same first weights. A difference of less than twice its standard error says little."""

ATTENTION = """\
Attention of the newest expert in its patch blocks, on the test images of its classes, after the \
last task, in per cent. SP and DP are pairs of the same and of different positions, SH and DH of \
the same head and of different ones. A head of an older expert is a different one."""

CANNOT_BE_CLAIMED = """\
- **The paper's absolute figures and its order at 500 epochs**: it has 100 classes, a memory of \
2,000 and networks several times as large.
- **Full ResNet-18**: it begins with 20 channels instead of 64, to cost about as much as the \
transformer."""

CLAIMS = """\
The difference is of the last accuracy, in points, on the same orders of classes. Its error is the \
larger one of the standard errors over seeds and over test images. A claim is shown if the \
difference is more than twice its error, and at least what was asked."""
