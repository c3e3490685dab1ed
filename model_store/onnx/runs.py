"""A lineage as runs of experts that a graph computes together."""

from __future__ import annotations

from dataclasses import dataclass

from model_store.spec import NetworkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Experts of equal shape that are computed together; the first expert is one by itself."""

    experts: tuple[int, ...]
    before: int
    heads: int
    attention_heads: int
    width: int

    @property
    def end(self) -> int:
        """The heads of the lineage up to the last expert of this run."""
        return self.before + len(self.experts) * self.heads

    @property
    def is_first(self) -> bool:
        return self.before == 0

    def sources(self, slot: int) -> int:
        """The heads that an expert of this run reads."""
        return self.before + (slot + 1) * self.heads


def runs_of(spec: NetworkSpec) -> tuple[Run, ...]:
    runs: list[list[int]] = []
    for index, task in enumerate(spec.tasks):
        if index > 1 and task.expert == spec.tasks[index - 1].expert:
            runs[-1].append(index)
        else:
            runs.append([index])
    heads = [task.expert.heads for task in spec.tasks]
    return tuple(
        Run(
            experts=tuple(run),
            before=sum(heads[: run[0]]),
            heads=heads[run[0]],
            attention_heads=spec.tasks[run[0]].expert.attention_heads,
            width=heads[run[0]] * spec.head_width,
        )
        for run in runs
    )
