"""How much memory a pass over a batch takes besides the weights, by arithmetic on the shape of a
network. A few hundred kilobytes of weights can ask for gigabytes: the numbers between two layers
grow with the patches of an image, and not with the weights.

Letters: N = B·P rows, one a position of an image of the batch; S experts of a run, k heads of each,
K = S·k; C channels of an expert; H heads up to the end of the run; D channels of a head, E = D ·
ratio. Checked against what processes took: `docs/adr/032-a-server-keeps-to-what-it-can-serve.md`.
"""

from __future__ import annotations

from model_store.spec import ExpertRun, NetworkSpec

NUMBER_BYTES = 4
MARGIN = 1.25
"""For what the arithmetic leaves out: buffers of threads, numbers in another precision."""


def pass_bytes(spec: NetworkSpec, *, batch: int, backend: str, workers: int = 1) -> int:
    """What `workers` passes at a time over `batch` images each take at their fullest moment."""
    count = _in_onnxruntime if backend == "onnx" else _in_torch
    return int(MARGIN * NUMBER_BYTES * workers * count(spec, batch=batch))


def scratch_numbers(spec: NetworkSpec, *, rows: int) -> int:
    """As `network.views.Layout` lays them out: what a block leaves for younger experts, and the
    task attention of one run after the other."""
    narrow, wide = spec.head_width, spec.hidden_width
    heads = sum(task.expert.heads for task in spec.tasks)
    mixing = []
    for run in spec.runs()[1:]:
        own = len(run.experts) * run.heads
        reader = run.heads * (run.end * (narrow + 1) + wide)
        asking = own * (wide + 2 * run.end + narrow)
        mixing.append(asking + max(reader, len(run.experts) * narrow))
    return rows * (heads * (narrow + wide) + max(mixing, default=0))


def _in_torch(spec: NetworkSpec, *, batch: int) -> int:
    rows = batch * spec.positions
    attending = max(_attending(spec, run) for run in spec.runs())
    asking = max(len(run.experts) * run.heads for run in spec.runs()) * spec.hidden_width**2
    return (
        _images(spec, batch=batch)
        + scratch_numbers(spec, rows=rows)
        + rows * (spec.token_width + attending)
        + asking
    )


def _in_onnxruntime(spec: NetworkSpec, *, batch: int) -> int:
    """Its attention keeps a map of all pairs of positions, before and after the softmax."""
    rows = batch * spec.positions
    maps = max(
        2 * len(run.experts) * run.attention_heads * spec.positions + _attending(spec, run)
        for run in spec.runs()
    )
    heads = sum(task.expert.heads for task in spec.tasks)
    left = 2 * spec.token_width + 3 * heads * (spec.head_width + spec.hidden_width)
    mixing = max((_reading(spec, run) for run in spec.runs()[1:]), default=0)
    return _images(spec, batch=batch) + rows * (left + max(maps, mixing))


def _images(spec: NetworkSpec, *, batch: int) -> int:
    """The images, and their patches as the rows of a matrix."""
    return 2 * batch * 3 * spec.image_size**2


def _attending(spec: NetworkSpec, run: ExpertRun) -> int:
    """Numbers a row: normalised, queries, keys and values, mixed in two orders, and the sum; and
    how much the token's heads read of each position."""
    channels = len(run.experts) * run.heads * spec.head_width
    return 7 * channels + 2 * len(run.experts) * run.attention_heads


def _reading(spec: NetworkSpec, run: ExpertRun) -> int:
    """Numbers a row of the task attention of a run, in a graph that keeps all at hand."""
    own, narrow, wide = len(run.experts) * run.heads, spec.head_width, spec.hidden_width
    scaled = run.heads * run.end * (narrow + 1)
    return scaled + own * (3 * wide + 4 * run.end) + run.end * (wide + 2 * narrow)
