"""Write the folded network as an ONNX graph: the computation of `inference/forward.py` in nodes.

Shapes: B images, P positions, N = B·P rows, S experts of a run, k heads of each of them, K = S·k,
C channels of an expert, H source heads, D channels of a head, E = D · ratio, Y classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_store.onnx.matmul_nodes import product
from model_store.onnx.mixing import Mixing
from model_store.onnx.writer import Writer
from model_store.spec import ExpertRun, NetworkSpec


class GraphOf:
    """A writer of the nodes of one network. Its weights are declared before, by name."""

    def __init__(self, writer: Writer, spec: NetworkSpec) -> None:
        self._w = writer
        self._spec = spec
        self._runs = spec.runs()
        self._stacked: dict[tuple[str, ExpertRun], str] = {}

    def logits(self, token_BC: str) -> str:
        product_BY = self._w.op("MatMul", token_BC, "heads.weight")
        return self._w.op("Add", product_BY, "heads.bias")

    def token(self) -> str:
        """Compute the token: the slices of all experts, oldest first."""
        return self._w.join(self._slices_of_runs(), axis=1)

    def _slices_of_runs(self) -> list[str]:
        """Compute the token slices of each run: [B, S·C]."""
        spec = self._spec
        in_sequence = spec.token == "in-sequence"
        patches_NI = self._patches()
        rows = [self._embedded(run, patches_NI) for run in self._runs]
        for layer in range(spec.depth - in_sequence):
            attended = [
                self._attend(run, x, f"blocks.{layer}")
                for run, x in zip(self._runs, rows, strict=True)
            ]
            rows = self._mix(attended, f"blocks.{layer}")
        tokens = [self._attend_first(run, x) for run, x in zip(self._runs, rows, strict=True)]
        rows = self._mix(tokens, "blocks.last")
        return [self._slices(run, x) for run, x in zip(self._runs, rows, strict=True)]

    def _weight(self, run: ExpertRun, name: str, *, row: bool = False) -> str:
        """Stack the weights of all experts of a run along a new first axis.

        A vector that is broadcast over rows needs `row`. The first expert's weights stay as is.
        """
        if run.is_first:
            return f"experts.0.{name}"
        key = (name, run)
        if key not in self._stacked:
            stacked = self._w.stack([f"experts.{index}.{name}" for index in run.experts])
            if row:
                stacked = self._w.op("Unsqueeze", stacked, self._w.integers(1))
            self._stacked[key] = stacked
        return self._stacked[key]

    def _rows(self, run: ExpertRun, x: str, *, width: int) -> str:
        """Reshape to rows: [N, C] for the first expert, else [S, N, C]."""
        experts = [] if run.is_first else [len(run.experts)]
        return self._w.reshape(x, *experts, -1, width)

    def _linear(self, run: ExpertRun, x: str, name: str) -> str:
        weighted = product(self._w, x, self._weight(run, f"{name}.weight"))
        return self._w.op("Add", weighted, self._weight(run, f"{name}.bias", row=True))

    def _patches(self) -> str:
        """Cut images into [N, numbers of a patch], in the order of a convolution's weights."""
        size, grid = self._spec.patch_size, self._spec.image_size // self._spec.patch_size
        cut = self._w.reshape("images", -1, 3, grid, size, grid, size)
        return self._w.reshape(self._w.transpose(cut, 0, 2, 4, 1, 3, 5), -1, 3 * size * size)

    def _embedded(self, run: ExpertRun, patches_NI: str) -> str:
        spec, w = self._spec, self._w
        experts = [] if run.is_first else [len(run.experts)]
        embedded = w.op("MatMul", patches_NI, self._weight(run, "embed"))
        x = w.reshape(embedded, *experts, -1, spec.patches, run.width)
        if spec.token == "in-sequence":
            pads = w.integers(1, 0)
            x = w.op("Pad", x, pads, "", w.integers(len(experts) + 1))
        return self._rows(
            run, w.op("Add", x, self._weight(run, "position", row=True)), width=run.width
        )

    def _attend(self, run: ExpertRun, x: str, block: str) -> str:
        w, heads = self._w, run.attention_heads
        name = f"{block}.attention"
        normed = w.normalised(x, width=run.width, eps=self._spec.layer_norm_eps)
        qkv = self._linear(run, normed, f"{name}.qkv")
        split = w.reshape(qkv, -1, self._spec.positions, 3, heads, run.width // heads)
        by_part = w.transpose(split, 2, 0, 3, 1, 4)
        q, k, v = (
            w.op("Squeeze", part, w.integers(0)) for part in w.split(by_part, parts=3, axis=0)
        )
        scores = w.op("MatMul", q, w.transpose(k, 0, 1, 3, 2))
        weights = w.op("Softmax", scores, axis=-1)
        if self._spec.attention == "gated":
            weights = self._with_places(run, weights, name)
        mixed = w.op("MatMul", weights, v)
        rows = self._rows(run, w.transpose(mixed, 0, 2, 1, 3), width=run.width)
        return w.op("Add", x, self._linear(run, rows, f"{name}.out"))

    def _with_places(self, run: ExpertRun, weights: str, name: str) -> str:
        """Mix attention weights with those that the places alone give."""
        w, shape = self._w, (run.attention_heads, self._spec.patches, self._spec.patches)
        if not run.is_first:
            weights = w.reshape(weights, len(run.experts), -1, *shape)
        by_content = w.op("Mul", weights, self._weight(run, f"{name}.content", row=True))
        mixed = w.op("Add", by_content, self._weight(run, f"{name}.places", row=True))
        return mixed if run.is_first else w.reshape(mixed, -1, *shape)

    def _attend_first(self, run: ExpertRun, x: str) -> str:
        """Attend from the first position alone, as `inference.attention.attend_first` does."""
        w, spec, name = self._w, self._spec, "blocks.last.attention"
        experts, heads, width = len(run.experts), run.attention_heads, run.width
        by_head = (experts, heads, -1)
        x_SBPC = w.reshape(x, experts, -1, spec.positions, width)
        if spec.token == "class-attention":
            x_SBPC = self._with_token(run, x_SBPC)
        normed_SBPC = w.normalised(x_SBPC, width=width, eps=spec.layer_norm_eps)
        own = self._first_position(run, normed_SBPC)
        query = w.reshape(
            self._linear(run, own, f"{name}.query"), experts, -1, heads, width // heads
        )
        query = w.reshape(w.transpose(query, 0, 2, 1, 3), experts * heads, -1, width // heads)
        projected = w.reshape(
            w.op("MatMul", query, self._by_head(run, f"{name}.key")), *by_head, width
        )
        scores = w.op(
            "MatMul", w.transpose(projected, 0, 2, 1, 3), w.transpose(normed_SBPC, 0, 1, 3, 2)
        )
        read = w.op("MatMul", w.op("Softmax", scores, axis=-1), normed_SBPC)
        read = w.reshape(w.transpose(read, 0, 2, 1, 3), experts * heads, -1, width)
        mixed = w.op("MatMul", read, self._by_head(run, f"{name}.value"))
        mixed = w.transpose(w.reshape(mixed, *by_head, width // heads), 0, 2, 1, 3)
        out = self._linear(run, self._rows(run, mixed, width=width), f"{name}.out")
        return w.op("Add", self._first_position(run, x_SBPC), out)

    def _by_head(self, run: ExpertRun, name: str) -> str:
        return self._w.join([f"experts.{index}.{name}" for index in run.experts], axis=0)

    def _first_position(self, run: ExpertRun, x_SBPC: str) -> str:
        return self._rows(run, self._w.first(x_SBPC, end=1, axis=2), width=run.width)

    def _with_token(self, run: ExpertRun, x_SBPC: str) -> str:
        w, experts = self._w, len(run.experts)
        token = w.reshape(self._weight(run, "token"), experts, 1, 1, run.width)
        one_each = w.op("Shape", "images", start=0, end=1)
        shape = w.op("Concat", w.integers(experts), one_each, w.integers(1, run.width), axis=0)
        return w.op("Concat", w.op("Expand", token, shape), x_SBPC, axis=2)

    def _slices(self, run: ExpertRun, x: str) -> str:
        normed = self._normed(run, x, "norm")
        if run.is_first:
            return normed
        width = len(run.experts) * run.width
        return self._w.reshape(self._w.transpose(normed, 1, 0, 2), -1, width)

    def _normed(self, run: ExpertRun, x: str, name: str) -> str:
        """Apply a LayerNorm with the scale and bias of each expert."""
        normed = self._w.normalised(x, width=run.width, eps=self._spec.layer_norm_eps)
        scaled = self._w.op("Mul", normed, self._weight(run, f"{name}.weight", row=True))
        return self._w.op("Add", scaled, self._weight(run, f"{name}.bias", row=True))

    def _mix(self, rows: Sequence[str], block: str) -> list[str]:
        """Add the second half of a block to the rows: all experts widen, then all narrow."""
        w, spec, (first, *later) = self._w, self._spec, self._runs
        normed = [
            self._normed(run, x, f"{block}.norm") for run, x in zip(self._runs, rows, strict=True)
        ]
        hidden_first = w.op("Gelu", self._linear(first, normed[0], f"{block}.widen"))
        narrowed = self._linear(first, hidden_first, f"{block}.narrow")
        out = [w.op("Add", rows[0], narrowed)]
        narrow_sources, wide_sources = [normed[0]], [hidden_first]
        for run, x, own in zip(later, rows[1:], normed[1:], strict=True):
            mixing = Mixing(w, spec, run, self._weight)
            narrow_sources.append(mixing.beside(own))
            hidden = mixing.widen(own, w.join(narrow_sources, axis=1), f"{block}.widen")
            read = mixing.narrow(hidden, w.join(wide_sources, axis=1), f"{block}.narrow")
            wide_sources.append(hidden)
            out.append(w.op("Add", x, read))
        return out
