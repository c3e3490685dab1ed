"""Compute the memory that a pass over a batch takes besides the weights, from the network's shape.

A few hundred kilobytes of weights can ask for gigabytes: activations grow with the patches of an
image, not with the weights.

Letters: N = B·P rows, one a position of an image of the batch; S experts of a run, k heads of each,
K = S·k; C channels of an expert; H heads up to the end of the run; D channels of a head, E = D ·
ratio. `docs/adr/032-a-server-keeps-to-what-it-can-serve.md` compares the results with processes.
"""

from __future__ import annotations

from model_store.spec import ExpertRun, NetworkSpec

NUMBER_BYTES = 4
MARGIN = 1.25
"""Covers what the arithmetic leaves out: buffers of threads, numbers in another precision."""


def pass_bytes(spec: NetworkSpec, *, batch: int, backend: str, workers: int = 1) -> int:
    """Bound the bytes that `workers` simultaneous passes over `batch` images each take at most."""
    count = _in_onnxruntime if backend == "onnx" else _in_torch
    return int(MARGIN * NUMBER_BYTES * workers * count(spec, batch=batch))


def scratch_numbers(spec: NetworkSpec, *, rows: int) -> int:
    """Count the numbers of the workspace's layout: the activations that a block keeps for younger
    experts, and the task attention of one run after the other."""
    narrow, wide = spec.head_width, spec.hidden_width
    heads = sum(expert.heads for expert in spec.experts)
    mixing = []
    for run in spec.runs()[1:]:
        own = len(run.experts) * run.heads
        reader = run.heads * (run.end * (narrow + 1) + wide)
        asking = own * (wide + 2 * run.end + narrow)
        mixing.append(asking + max(reader, len(run.experts) * narrow))
    return rows * (heads * (narrow + wide) + max(mixing, default=0))


def _in_torch(spec: NetworkSpec, *, batch: int) -> int:
    rows = batch * spec.positions_of(0)
    attending = max(_attending(spec, run) for run in spec.runs()) + _backbone(spec)
    asking = max(len(run.experts) * run.heads for run in spec.runs()) * spec.hidden_width**2
    return (
        _images(spec, batch=batch)
        + scratch_numbers(spec, rows=rows)
        + rows * (spec.token_width + attending)
        + asking
    )


def _in_onnxruntime(spec: NetworkSpec, *, batch: int) -> int:
    """Count numbers in onnxruntime, whose attention keeps a map of all pairs of positions, before
    and after the softmax."""
    rows = batch * spec.positions_of(0)
    maps = max(
        2 * len(run.experts) * run.attention_heads * spec.positions_of(0) + _attending(spec, run)
        for run in spec.runs()
    )
    maps += _backbone(spec)
    heads = sum(expert.heads for expert in spec.experts)
    left = 2 * spec.token_width + 3 * heads * (spec.head_width + spec.hidden_width)
    mixing = max((_reading(spec, run) for run in spec.runs()[1:]), default=0)
    return _images(spec, batch=batch) + rows * (left + max(maps, mixing))


def _backbone(spec: NetworkSpec) -> int:
    """Count the numbers a row that a backbone has beside those of a plain first expert: its block
    is computed outside the workspace, and queries and keys are turned into copies."""
    if spec.backbone is None:
        return 0
    hidden = spec.mlp_ratio * (4 if spec.backbone.activation == "swiglu" else 3)
    return (2 + hidden + 6) * spec.width_of(0)


def _images(spec: NetworkSpec, *, batch: int) -> int:
    """Count the images, and their patches as the rows of a matrix."""
    return 2 * batch * 3 * spec.image_size**2


def _attending(spec: NetworkSpec, run: ExpertRun) -> int:
    """Count the numbers a row of self-attention: normalised input, queries, keys and values, the
    mix in two orders, the sum, and the weights by which the token's heads read each position."""
    channels = len(run.experts) * run.heads * spec.head_width
    return 7 * channels + 2 * len(run.experts) * run.attention_heads


def _reading(spec: NetworkSpec, run: ExpertRun) -> int:
    """Count the numbers a row of a run's task attention, in a graph that keeps all of them."""
    own, narrow, wide = len(run.experts) * run.heads, spec.head_width, spec.hidden_width
    scaled = run.heads * run.end * (narrow + 1)
    return scaled + own * (3 * wide + 4 * run.end) + run.end * (wide + 2 * narrow)
