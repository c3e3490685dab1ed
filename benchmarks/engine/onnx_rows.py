"""The engine's figures that are about ONNX and reduced precision."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.grown import paper_spec, publish_lineage, random_network
from benchmarks.engine.turns import in_turns
from benchmarks.figures import Figure, at_least, at_most
from model_store.inference.forward import FoldedNetwork
from model_store.onnx.export import export_onnx
from model_store.onnx.model import weights_of
from model_store.onnx.session import Session
from model_store.store.store import Store

BATCH = 8
Measured = tuple[list[Figure], dict[str, float]]


def measure_export(*, rounds: int) -> Measured:
    """What exporting costs, and whether the answers are those of torch."""
    network = random_network(paper_spec(11))
    took: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store.create(str(folder / "models"))
        eight, nine, eleven = publish_lineage(store, network, (8, 9, 11))
        export_onnx(store, eight.version, out=folder / "onnx")
        younger = export_onnx(store, nine.version, out=folder / "onnx")
        for number in range(max(3, rounds // 3)):
            began_s, used_s = time.perf_counter(), time.process_time()
            export_onnx(store, eleven.version, out=folder / f"alone-{number}")
            took.append((time.perf_counter() - began_s, time.process_time() - used_s))
    images = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = network(images).numpy()
    found = Session(weights_of(network), threads=1)(images.numpy())
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    seconds, processor = np.median(took, axis=0).tolist()
    return [
        at_most(
            "ONNX export of version 9 after 8: bytes written ÷ bytes of a full export",
            younger.written_bytes / younger.total_bytes,
            0.25,
        ),
        at_most("ONNX export of 11 tasks, s", seconds, 2),
    ], {
        "ONNX export of 11 tasks, s of processor time": processor,
        "version 9 exported after 8, MB": younger.written_bytes / 1e6,
        "version 9 exported alone, MB": younger.total_bytes / 1e6,
        "largest difference of a logit of ONNX in 1e-6": 1e6 * error,
    }


def measure_precision(*, rounds: int) -> Measured:
    """6 tasks, batch 8."""
    network = random_network(paper_spec(6))
    images = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    folded = FoldedNetwork.of(network)
    whole = Session(weights_of(network), threads=1)
    small = Session(weights_of(network, precision="int8"), threads=1)
    took = in_turns(
        {
            "torch fp32": lambda: folded(images),
            "ONNX fp32": lambda: whole(images.numpy()),
            "ONNX int8": lambda: small(images.numpy()),
        },
        rounds=2 * rounds,
    )
    best = min(took["torch fp32"], took["ONNX fp32"])
    figure = at_least("best precision ÷ best fp32, 6 tasks, batch 8", best / took["ONNX int8"], 1.6)
    return [figure], {f"ms, 6 tasks, {name}": 1000 * s for name, s in took.items()}
