"""Make the engine that serves, and choose its backend where that is left to the server."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Literal

from dne_serve.engines.base import Engine
from model_store.errors import DneError, WrongUsage
from model_store.precision import Asked, Trial, disagreement, try_out
from model_store.records.manifest import Manifest
from model_store.records.quality import Reduced
from model_store.store.store import Store

Backend = Literal["torch", "onnx"]

PAYS = 1.5
"""The speed-up of a trial from which onnx is taken. A trial is mostly large products; against torch
a whole version gains less, down to 1.2 where the trial said 1.9 (ADR 018)."""

log = logging.getLogger("dne_serve")


def choose_engine(
    backend: str,
    *,
    device: str,
    threads: int | None,
    max_batch: int = 1,
    precision: Asked = "auto",
    workers: int | None = None,
    pack: bool = False,
) -> Engine:
    """Imported here, because torch and onnxruntime take seconds."""
    if backend == "onnx":
        from dne_serve.engines.onnx_engine import OnnxEngine

        return OnnxEngine(
            device=device, threads=threads, precision=precision, workers=workers, pack=pack
        )
    if workers is not None and workers > 1:
        raise WrongUsage(f"--workers {workers}: the backend torch runs one batch at a time")
    from dne_serve.engines.torch_engine import TorchEngine

    return TorchEngine(device=device, threads=threads, max_batch=max_batch, precision=precision)


def backend_for(
    served: Manifest | None,
    *,
    asked: Asked,
    device: str,
    try_out: Callable[[Reduced], Trial] = try_out,
) -> Backend:
    """onnx where it may compute the version in 8 bits on this processor and that pays, or where
    8 bits were asked for by name; else torch. May try 8 bits out, which takes seconds."""
    reason = _against_onnx(served, asked=asked, device=device, try_out=try_out)
    log.info("backend %s", f"torch: {reason}" if reason else "onnx")
    return "torch" if reason else "onnx"


def served_by(store: Store | None, *, channel: str) -> Manifest | None:
    """What the channel names, if that can be read: serving it will say what is wrong with it."""
    if store is None:
        return None
    try:
        record = store.head(channel)
        return None if record is None else store.resolve(record)
    except DneError:
        return None


def _against_onnx(
    served: Manifest | None, *, asked: Asked, device: str, try_out: Callable[[Reduced], Trial]
) -> str | None:
    """Why torch is taken."""
    if asked not in ("auto", "int8"):
        return f"precision {asked} was asked for"
    if _has_gpu(device):
        return "there is a GPU"
    if asked == "int8":
        return None  # and if it cannot be had, the engine says so
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed"
    if served is None:
        return "the channel names no version yet"
    refused = disagreement("int8", served.metrics.agreement)
    if refused is not None:
        return f"version {served.version}: {refused}"
    trial = try_out("int8")
    if not trial.runs:
        return f"int8 does not run here: {trial.reason}"
    if trial.speedup < PAYS:
        return f"int8 is {trial.speedup:.2f} × as fast here, and {PAYS} are asked"
    return None


def _has_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    from model_store.network.device import choose_device  # here, because torch takes seconds

    return choose_device(device).type != "cpu"
