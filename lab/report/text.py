"""Hold the sentences of the report that do not depend on results."""

from __future__ import annotations

INTRODUCTION = """\
All methods run in one harness: the same order of classes, the same images, memory and \
augmentation, the same number of epochs, and one way of counting. Methods that begin alike share \
their first task. `python -m lab report` writes this page from the lines in `lab/results`; \
`python -m lab campaign` runs the cells that are missing."""

METRICS = """\
- **LA** is the accuracy of all classes after the last task, in per cent. **AA** is its average \
over the tasks.
- **D** is LA minus the LA of Joint on the same backbone. Joint learns all classes at once.
- **F** is the cost of an answer to one image, in GFLOP; a multiply-add counts as two. *Served* is \
the cost in the form that the server runs, where there is one.
- **new** and **old** are the accuracies of the newest task's classes and of all earlier ones, \
among all classes so far. *All tasks* is the average over the tasks after the first.
- **new, alone** is the accuracy of the newest task's classes among themselves, over the tasks \
after the first. It tells what was learnt, whatever the balance between new and old. Lines that \
were written before it was measured do not have it.
- **forgetting** is the average over the old tasks of the best minus the last accuracy.
- **IA** is independent attention: DNE whose experts read their own channels only.
- **passes** are the passes through a backbone that an answer takes.
- A number after ± is the standard error of the mean over seeds. A seed fixes the order of the \
classes and all random draws.
- *The paper's* figures come from 500 epochs, all images and larger networks. They serve to \
compare the order of the methods, and nothing else."""

SAME_BACKBONE = """\
All rows use the transformer, so the methods differ and the backbone does not. The best LA comes \
first."""

MATCHED_COST = """\
Each method has the backbone that it was published on, or the one that is named. The cheapest \
answer comes first. Compare rows of about the same F: a share near 1 costs as much as DNE k = 1. \
CPU minutes are those of learning all tasks, with the shared first task; "≥" marks cells that were \
stopped and went on, which count their last run only."""

DIFFERENCES = """\
Differences in points to DNE k = 1 on the same orders of classes: a row minus DNE. Pairs take away \
the difference between easy and hard orders. "The same" first task means that both begin with the \
same weights. A difference of less than twice its standard error says little, and two or three \
pairs give a rough standard error."""

ATTENTION = """\
Attention of the newest expert in its patch blocks, on the test images of its classes, after the \
last task, in per cent. SP and DP are pairs of the same and of different positions, SH and DH of \
the same head and of different ones. A head of an older expert is a different one."""

CANNOT_BE_CLAIMED = """\
- **The paper's absolute figures.** They come from 500 epochs a task, 500 images a class, a memory \
of 2,000 and networks several times as large.
- **The paper's order at 500 epochs.** Methods differ in how fast they learn. A method that comes \
first after {epochs} epochs a task need not come first after 500.
- **Full ResNet-18.** The ResNet-18 here begins with {resnet_width} channels instead of 64, to \
cost about as much as the transformer.
- **Small differences.** There are two or three seeds. A difference of about one standard error is \
noise.
- **CIFAR-100 as others report it.** Each class has {images} of its 500 training images, so that a \
cell takes minutes on one core. The test set is whole.
- **Other data.** Larger images, other domains and longer sequences of tasks were not tried."""
