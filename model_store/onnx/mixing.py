"""Write the task attention of one run of experts as nodes. Shapes: as in `graph.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from model_store.onnx.matmul_nodes import Rows, by_head, first_of, multiplied, product, rows_for
from model_store.onnx.writer import Writer
from model_store.spec import ExpertRun, NetworkSpec


class Mixing:
    """The two linear layers of a run in one block. `weight` stacks the weights of a name."""

    def __init__(
        self,
        writer: Writer,
        spec: NetworkSpec,
        run: ExpertRun,
        weight: Callable[[ExpertRun, str], str],
    ) -> None:
        self._w = writer
        self._spec = spec
        self._run = run
        self._weight = weight
        self._narrow = spec.head_width
        self._wide = spec.hidden_width

    def beside(self, x_SNC: str) -> str:
        """Put the experts of the run side by side: [N, S·C]."""
        width = len(self._run.experts) * self._run.width
        return self._w.reshape(self._w.transpose(x_SNC, 1, 0, 2), -1, width)

    def widen(self, own_SNC: str, sources: str, name: str) -> str:
        """Compute the first linear layer [N, K·E]: scale the narrow sources, then multiply once."""
        w, run = self._w, self._run
        own = w.reshape(own_SNC, len(run.experts), -1, self._narrow)
        sources_NHD = w.reshape(sources, -1, run.end, self._narrow)
        weights = self._weigh(own, [sources_NHD], name, width=self._narrow)
        written = []
        for slot, (index, weights_NkH) in enumerate(zip(run.experts, weights, strict=True)):
            heads, expert = run.sources(slot), f"experts.{index}.{name}"
            read = self._up_to(sources_NHD, heads, axis=1)
            scaled = w.op(
                "Mul",
                w.op("Unsqueeze", weights_NkH, w.integers(3)),
                w.op("Unsqueeze", read, w.integers(1)),
            )
            matrix = w.reshape(scaled, -1, heads * self._narrow)
            value = product(w, matrix, f"{expert}.value", spec=self._spec)
            value = w.op("Add", value, self._bias(weights_NkH, heads, expert))
            written.append(w.reshape(value, -1, run.heads * self._wide))
        return w.op("Gelu", w.join(written, axis=1))

    def narrow(self, own: str, before: str, name: str) -> str:
        """Compute the second linear layer [S, N, C]: multiply the wide sources, then mix.

        `own` are the heads of the run and `before` all older heads. They are large, so they are
        not joined.
        """
        w, run, wide = self._w, self._run, self._wide
        experts, heads = len(run.experts), len(run.experts) * run.heads
        own_NSkE = w.reshape(own, -1, experts, run.heads, wide)
        by_expert = w.reshape(w.transpose(own_NSkE, 1, 0, 2, 3), experts, -1, wide)
        sources = [w.reshape(before, -1, run.before, wide), w.reshape(own, -1, heads, wide)]
        weights = self._weigh(by_expert, sources, name, width=wide)
        like = f"experts.{run.experts[0]}.{name}.own"
        older = by_head(w, rows_for(w, before, like, spec=self._spec), heads=run.before, width=wide)
        inside = by_head(w, rows_for(w, own, like, spec=self._spec), heads=heads, width=wide)
        return w.join(
            [self._read(slot, older, inside, one, name) for slot, one in enumerate(weights)],
            axis=0,
        )

    def _read(self, slot: int, older: Rows, inside: Rows, weights_NkH: str, name: str) -> str:
        """Mix the products of all sources for one expert: [1, N, C]."""
        w, run = self._w, self._run
        heads, expert = run.sources(slot), f"experts.{run.experts[slot]}.{name}"
        inside = first_of(w, inside, count=heads - run.before)
        sizes = w.integers(run.before, heads - run.before)
        parts = w.ops("Split", weights_NkH, sizes, count=2, axis=2)
        mixed = [w.reshape(self._bias(weights_NkH, heads, expert), -1, run.heads, self._narrow)]
        for part_NkH, rows, weight in zip(parts, (older, inside), ("before", "own"), strict=True):
            value_HND = multiplied(w, rows, f"{expert}.{weight}")
            mixed.append(w.op("MatMul", part_NkH, w.transpose(value_HND, 1, 0, 2)))
        return w.reshape(w.op("Sum", *mixed), 1, -1, run.width)

    def _weigh(self, own: str, sources_NHD: Sequence[str], name: str, *, width: int) -> list[str]:
        """Compute the weight of each source head, for each expert: [N, k, H of the expert]."""
        w, run = self._w, self._run
        experts = len(run.experts)
        projected = w.op("MatMul", own, self._weight(run, f"{name}.query_key"))
        projected = w.transpose(w.reshape(projected, experts, -1, run.heads, width), 1, 0, 2, 3)
        projected_NKD = w.reshape(projected, -1, experts * run.heads, width)
        scores_NKH = w.join(
            [w.op("MatMul", projected_NKD, w.transpose(one, 0, 2, 1)) for one in sources_NHD],
            axis=2,
        )
        if experts > 1:
            scores_NKH = w.op("Add", scores_NKH, w.constant(self._mask()))
        weights_NKH = w.op("Softmax", scores_NKH, axis=-1)
        if run.heads > 1:
            scale = w.reshape(self._weight(run, f"{name}.scale"), 1, experts * run.heads, 1)
            weights_NKH = w.op("Mul", weights_NKH, scale)
        by_expert = [weights_NKH] if experts == 1 else w.split(weights_NKH, parts=experts, axis=1)
        return [self._up_to(part, run.sources(slot), axis=2) for slot, part in enumerate(by_expert)]

    def _bias(self, weights_NkH: str, heads: int, expert: str) -> str:
        """Mix the biases of the values by the weights: [N·k, E]."""
        return self._w.op("MatMul", self._w.reshape(weights_NkH, -1, heads), f"{expert}.bias")

    def _up_to(self, value: str, heads: int, *, axis: int) -> str:
        whole = heads == self._run.end
        return value if whole else self._w.first(value, end=heads, axis=axis)

    def _mask(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Build [1, K, H]: minus infinity for sources that are younger than their reader."""
        run = self._run
        age_H = (np.arange(run.end) - run.before) // run.heads
        younger = age_H[None, :] > age_H[run.before :, None]
        return np.where(younger, -np.inf, 0).astype(np.float32)[None]
