"""Write the folded network as an ONNX graph: the computation of `inference/forward.py` in nodes.

Shapes: B images, P positions, N = B·P rows, S experts of a run, k heads of each of them, K = S·k,
C channels of an expert, H source heads, D channels of a head, E = D · ratio, Y classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model_store.inference.doubt import LEAST_NORM
from model_store.network.backbone import QUICK
from model_store.network.readout import shares_of
from model_store.onnx.matmul_nodes import product
from model_store.onnx.mixing import Mixing
from model_store.onnx.writer import Writer
from model_store.spec import PLAIN, Activation, Convolution, ExpertRun, NetworkSpec


def activated(writer: Writer, x: str, kind: Activation) -> str:
    """Apply the function between two linear layers."""
    if kind == "gelu":
        return writer.op("Gelu", x)
    if kind == "tanh-gelu":
        return writer.op("Gelu", x, approximate="tanh")
    if kind == "quick-gelu":
        quick = writer.constant(np.asarray(QUICK, dtype=np.float32))
        return writer.op("Mul", x, writer.op("Sigmoid", writer.op("Mul", x, quick)))
    gate, value = writer.split(x, parts=2, axis=-1)
    return writer.op("Mul", writer.op("Mul", gate, writer.op("Sigmoid", gate)), value)


def standardised(writer: Writer, hidden_NE: str, *, channels: int, of: int, eps: float) -> str:
    """Standardise the first channels, and put zeros after them."""
    first = writer.first(hidden_NE, end=channels, axis=1)
    normed = writer.normalised(first, width=channels, eps=eps)
    return writer.op("Pad", normed, writer.integers(0, of - channels), "", writer.integers(1))


def turned(writer: Writer, x_BHPD: str, norm: str, *, eps: float) -> str:
    """Normalise and turn queries or keys, as far as the weights for it are declared."""
    if writer.has(f"{norm}.weight"):
        x_BHPD = writer.op(
            "LayerNormalization",
            x_BHPD,
            f"{norm}.weight",
            f"{norm}.bias",
            axis=-1,
            epsilon=eps,
        )
    if not writer.has("experts.0.turn.cos"):
        return x_BHPD
    first, second = writer.split(x_BHPD, parts=2, axis=-1)
    swapped = writer.op("Concat", second, first, axis=-1)
    straight = writer.op("Mul", x_BHPD, "experts.0.turn.cos")
    return writer.op("Add", straight, writer.op("Mul", swapped, "experts.0.turn.sin"))


class GraphOf:
    """A writer of the nodes of one network. Its weights are declared before, by name."""

    def __init__(self, writer: Writer, spec: NetworkSpec) -> None:
        self._w = writer
        self._spec = spec
        self._runs = spec.runs()
        self._stacked: dict[tuple[str, ExpertRun], str] = {}
        self._shares = shares_of(spec)

    def logits(self, token_BC: str) -> str:
        product_BY = self._w.op("MatMul", token_BC, "heads.weight")
        return self._w.op("Add", product_BY, "heads.bias")

    def unknown_score(self, token_BC: str) -> str:
        """Compute the probability of none of the classes, as `inference.doubt.Doubt` does: [B]."""
        w, last = self._w, self._w.integers(1)
        slice_BW = w.first(token_BC, end=self._spec.doubt_width, axis=1)
        moved_BW = w.op("Sub", slice_BW, "doubt.shift")
        length_B1 = w.op("ReduceL2", moved_BW, last, keepdims=1)
        unit_BW = w.op("Div", moved_BW, w.op("Max", length_B1, w.number(LEAST_NORM)))
        z_BW = w.op("Add", w.op("MatMul", unit_BW, "doubt.project"), "doubt.bias")
        like_BY = w.op("Add", w.op("MatMul", z_BW, "doubt.prototypes"), "doubt.offsets")
        nearest_B = w.op("ReduceMax", like_BY, last, keepdims=0)
        away_B = w.op("Mul", w.op("ReduceSumSquare", z_BW, last, keepdims=0), w.number(0.5))
        return w.op("Sigmoid", w.op("Sub", away_B, nearest_B))

    def token(self) -> str:
        """Compute the token: the slices of all experts, oldest first."""
        return self._w.join(self._slices_of_runs(), axis=1)

    def _slices_of_runs(self) -> list[str]:
        """Compute the token slices of each run, [B, S·C], and the readout after the first."""
        spec = self._spec
        in_sequence, earlier = spec.token == "in-sequence", list[str]()
        patches_NI = self._patches() if spec.stem == "patches" else ""
        rows = [self._embedded(run, patches_NI) for run in self._runs]
        for layer in range(spec.depth - in_sequence):
            attended = [
                self._attend(run, x, f"blocks.{layer}")
                for run, x in zip(self._runs, rows, strict=True)
            ]
            rows = self._mix(attended, f"blocks.{layer}")
            earlier += self._read(layer + 1, rows[0])
        tokens = [self._attend_last(run, x) for run, x in zip(self._runs, rows, strict=True)]
        rows = self._mix(tokens, "blocks.last")
        rows[0] = self._pooled(rows[0])
        first, *later = (self._slices(run, x) for run, x in zip(self._runs, rows, strict=True))
        return [first, *earlier, *later]

    def _read(self, block: int, x: str) -> list[str]:
        """Read the output of a block of the first expert, as `network.readout.read_rows` does."""
        if block not in self._shares:
            return []
        w, spec, shares_RP = self._w, self._spec, self._shares[block].numpy()
        normed = w.normalised(x, width=spec.width_of(0), eps=spec.layer_norm_eps)
        by_image = w.reshape(normed, -1, spec.positions_of(0), spec.width_of(0))
        read_BRC = w.op("MatMul", w.constant(shares_RP), by_image)
        return [w.reshape(read_BRC, -1, shares_RP.shape[0] * spec.width_of(0))]

    def _attend_last(self, run: ExpertRun, x: str) -> str:
        """Attend from the token; from all that a backbone pools."""
        kind = self._spec.first if run.is_first else PLAIN
        if kind.pooling == "attention":
            return self._attend_pooled(run, x)
        if kind.rotary or kind.qk_norm or kind.pools_patches:
            return self._attend(run, x, "blocks.last", token=kind.pooling == "token")
        return self._attend_first(run, x)

    def _pooled(self, x: str) -> str:
        """Return what the last norm of the first expert reads: the mean of patches, or its rows."""
        return self._mean_of_patches(x) if self._spec.first.pooling == "mean" else x

    def _mean_of_patches(self, x: str) -> str:
        """Average the patches of each image in the first expert's rows: [B, C]."""
        w, spec = self._w, self._spec
        rows = w.reshape(x, -1, spec.positions_of(0), spec.width_of(0))
        ends = (w.integers(one) for one in (1, spec.positions, 1))
        return w.op("ReduceMean", w.op("Slice", rows, *ends), w.integers(1), keepdims=0)

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
        weighted = product(self._w, x, self._weight(run, f"{name}.weight"), spec=self._spec)
        return self._w.op("Add", weighted, self._weight(run, f"{name}.bias", row=True))

    def _patches(self) -> str:
        """Cut images into [N, numbers of a patch], in the order of a convolution's weights."""
        size, grid = self._spec.patch_size, self._spec.image_size // self._spec.patch_size
        cut = self._w.reshape("images", -1, 3, grid, size, grid, size)
        return self._w.reshape(self._w.transpose(cut, 0, 2, 4, 1, 3, 5), -1, 3 * size * size)

    def _through_stem(self, run: ExpertRun) -> str:
        """Compute the rows of patches by convolutions, side by side for all experts of a run."""
        w, spec, count = self._w, self._spec, len(run.experts)
        *stem, last = spec.convolutions(run.width)
        x = "images"
        for place, one in enumerate(stem):
            weight, bias = (
                self._side_by_side(run, f"stem.{place}.{part}") for part in ("weight", "bias")
            )
            groups = count if place else 1  # all experts read the same image
            x = w.op("Relu", self._convolved(x, weight, bias, one, groups=groups))
        embed_SIC = self._side_by_side(run, "embed")
        weight = w.transpose(w.reshape(embed_SIC, count, -1, run.width), 0, 2, 1)
        shaped = w.reshape(weight, count * run.width, last.reads, last.side, last.side)
        grid = self._convolved(x, shaped, "", last, groups=count)
        by_expert = w.reshape(grid, -1, count, run.width, spec.patches)
        return w.transpose(by_expert, 1, 0, 3, 2)

    def _convolved(self, x: str, weight: str, bias: str, one: Convolution, *, groups: int) -> str:
        return self._w.op(
            "Conv",
            x,
            weight,
            bias,
            strides=[one.stride] * 2,
            pads=[one.padding] * 4,
            kernel_shape=[one.side] * 2,
            group=groups,
        )

    def _embedded(self, run: ExpertRun, patches_NI: str) -> str:
        spec, w = self._spec, self._w
        experts = [] if run.is_first else [len(run.experts)]
        if spec.stem == "convolutions":
            embedded = self._through_stem(run)
        else:
            embedded = w.op("MatMul", patches_NI, self._weight(run, "embed"))
        x = w.reshape(embedded, *experts, -1, spec.patches, run.width)
        registers = spec.first.registers if run.is_first else 0
        if spec.token == "in-sequence":
            pads = w.integers(1, registers)
            x = w.op("Pad", x, pads, "", w.integers(len(experts) + 1))
        x = self._rows(
            run, w.op("Add", x, self._weight(run, "position", row=True)), width=run.width
        )
        if run.is_first and spec.first.pre_norm:
            return self._normed(run, x, "pre_norm")
        return x

    def _attend(self, run: ExpertRun, x: str, block: str, *, token: bool = False) -> str:
        """Attend from all positions, or from the `token` alone."""
        w, heads = self._w, run.attention_heads
        positions = self._spec.positions_of(run.experts[0])
        name = f"{block}.attention"
        normed = w.normalised(x, width=run.width, eps=self._spec.layer_norm_eps)
        qkv = self._linear(run, normed, f"{name}.qkv")
        split = w.reshape(qkv, -1, positions, 3, heads, run.width // heads)
        by_part = w.transpose(split, 2, 0, 3, 1, 4)
        q, k, v = (
            w.op("Squeeze", part, w.integers(0)) for part in w.split(by_part, parts=3, axis=0)
        )
        if run.is_first:
            eps = self._spec.layer_norm_eps
            q, k = (
                turned(w, one, f"experts.0.{name}.{part}_norm", eps=eps)
                for one, part in ((q, "q"), (k, "k"))
            )
        if token:
            q = w.first(q, end=1, axis=2)
            x = self._first_rows(x, width=run.width, of=positions, rows=1)
        scores = w.op("MatMul", q, w.transpose(k, 0, 1, 3, 2))
        weights = w.op("Softmax", scores, axis=-1)
        if self._spec.attention == "gated":
            weights = self._with_places(run, weights, name)
        mixed = w.op("MatMul", weights, v)
        rows = self._rows(run, w.transpose(mixed, 0, 2, 1, 3), width=run.width)
        return w.op("Add", x, self._linear(run, rows, f"{name}.out"))

    def _first_rows(self, x: str, *, width: int, of: int, rows: int) -> str:
        """Keep the first `rows` of each image's rows in [N, width]."""
        if of == rows:
            return x
        by_image = self._w.reshape(x, -1, of, width)
        return self._w.reshape(self._w.first(by_image, end=rows, axis=1), -1, width)

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
        x_SBPC = w.reshape(x, experts, -1, spec.positions_of(run.experts[0]), width)
        if spec.token == "class-attention":
            x_SBPC = self._with_token(run, x_SBPC)
        normed_SBPC = w.normalised(x_SBPC, width=width, eps=spec.layer_norm_eps)
        own = self._first_position(run, normed_SBPC)
        query = w.reshape(
            self._linear(run, own, f"{name}.query"), experts, -1, heads, width // heads
        )
        out = self._read_by(run, query, normed_SBPC)
        return w.op("Add", self._first_position(run, x_SBPC), out)

    def _attend_pooled(self, run: ExpertRun, x: str) -> str:
        """Answer the same query for all images, as `inference.attention.attend_pooled` does."""
        w, spec = self._w, self._spec
        heads, width = run.attention_heads, run.width
        x_SBPC = w.reshape(x, 1, -1, spec.patches, width)
        normed_SBPC = w.normalised(x_SBPC, width=width, eps=spec.layer_norm_eps)
        images = w.op("Shape", "images", start=0, end=1)
        rows = w.op("Concat", images, w.integers(width), axis=0)
        query = w.op("Expand", self._weight(run, "blocks.last.attention.query.bias"), rows)
        return self._read_by(run, w.reshape(query, 1, -1, heads, width // heads), normed_SBPC)

    def _read_by(self, run: ExpertRun, query: str, normed_SBPC: str) -> str:
        """Read the positions by one query an image, and project what is read: rows."""
        w, name = self._w, "blocks.last.attention"
        experts, heads, width = len(run.experts), run.attention_heads, run.width
        by_head = (experts, heads, -1)
        query = w.reshape(w.transpose(query, 0, 2, 1, 3), experts * heads, -1, width // heads)
        projected = w.reshape(
            w.op("MatMul", query, self._side_by_side(run, f"{name}.key")), *by_head, width
        )
        scores = w.op(
            "MatMul", w.transpose(projected, 0, 2, 1, 3), w.transpose(normed_SBPC, 0, 1, 3, 2)
        )
        read = w.op("MatMul", w.op("Softmax", scores, axis=-1), normed_SBPC)
        read = w.reshape(w.transpose(read, 0, 2, 1, 3), experts * heads, -1, width)
        mixed = w.op("MatMul", read, self._side_by_side(run, f"{name}.value"))
        mixed = w.transpose(w.reshape(mixed, *by_head, width // heads), 0, 2, 1, 3)
        return self._linear(run, self._rows(run, mixed, width=width), f"{name}.out")

    def _side_by_side(self, run: ExpertRun, name: str) -> str:
        """Join the weights of all experts of a run along their first axis."""
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
        if run.is_first and self._spec.first.pooling == "attention":
            return x
        normed = self._normed(run, x, "norm")
        if run.is_first and self._spec.first.pooling == "token-and-mean":
            token = self._first_rows(normed, width=run.width, of=self._spec.positions_of(0), rows=1)
            return self._w.join([token, self._mean_of_patches(normed)], axis=1)
        if run.is_first:
            return normed
        width = len(run.experts) * run.width
        return self._w.reshape(self._w.transpose(normed, 1, 0, 2), -1, width)

    def _normed(self, run: ExpertRun, x: str, name: str) -> str:
        """Apply a LayerNorm with the scale and bias of each expert."""
        normed = self._w.normalised(x, width=run.width, eps=self._spec.layer_norm_eps)
        scaled = self._w.op("Mul", normed, self._weight(run, f"{name}.weight", row=True))
        return self._w.op("Add", scaled, self._weight(run, f"{name}.bias", row=True))

    def _shown(self, normed: str, hidden: str, block: str) -> tuple[str, str]:
        """Keep the rows of a backbone that younger experts read."""
        spec, last, width = self._spec, block == "blocks.last", self._spec.width_of(0)
        if last and not spec.first.pools_patches:
            return normed, hidden
        of, rows = spec.positions_of(0), 1 if last else spec.positions
        wide = width * spec.mlp_ratio
        return (
            self._first_rows(normed, width=width, of=of, rows=rows),
            self._first_rows(hidden, width=wide, of=of, rows=rows),
        )

    def _mix(self, rows: Sequence[str], block: str) -> list[str]:
        """Add the second half of a block to the rows: all experts widen, then all narrow."""
        w, spec, (first, *later) = self._w, self._spec, self._runs
        normed = [
            self._normed(run, x, f"{block}.norm") for run, x in zip(self._runs, rows, strict=True)
        ]
        hidden_first = activated(
            w, self._linear(first, normed[0], f"{block}.widen"), spec.first.activation
        )
        if spec.first.hidden_norm:
            hidden_first = standardised(
                w,
                hidden_first,
                channels=spec.first.hidden_norm,
                of=spec.width_of(0) * spec.mlp_ratio,
                eps=spec.layer_norm_eps,
            )
        narrowed = self._linear(first, hidden_first, f"{block}.narrow")
        out = [w.op("Add", rows[0], narrowed)]
        normed[0], hidden_first = self._shown(normed[0], hidden_first, block)
        narrow_sources, wide_sources = [normed[0]], [hidden_first]
        for run, x, own in zip(later, rows[1:], normed[1:], strict=True):
            mixing = Mixing(w, spec, run, self._weight)
            narrow_sources.append(mixing.beside(own))
            hidden = mixing.widen(own, w.join(narrow_sources, axis=1), f"{block}.widen")
            read = mixing.narrow(hidden, w.join(wide_sources, axis=1), f"{block}.narrow")
            wide_sources.append(hidden)
            out.append(w.op("Add", x, read))
        return out
