"""Photos at 224 pixels with a pre-trained network, beside model servers with the same weights.

`python -m benchmarks.serving.photos --backbone dinov2_vits14=FILE --photos DIR`, where DIR has one
folder of photos a class, or `--cifar ZIP` in its place: CIFAR-100's images, enlarged, with noise.
Requests are a JPEG of 0.3 megapixels, and then one of 12. Ours runs with the engine that it chooses
without options. Peers compute with PyTorch, with onnxruntime in single precision and with
onnxruntime's dynamic 8 bits: a competent user has one of them in an afternoon.

Servers take turns. Besides requests a second there is the processor time of a request, of all
processes of a server: other programs on the machine change it little.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import signal
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from benchmarks.figures import Figure, at_least, print_figures
from benchmarks.serving.compare import ask
from benchmarks.serving.servers import MLSERVER, PEERS, THREADS, Running, Server, running

CLASSES, IMAGES = 5, 40
CONNECTIONS = (1, 8, 32)
SIZES = {"0.3 megapixels": (640, 480), "12 megapixels": (4000, 3000)}
NOISE = 12
OURS = "dne-serve"


def ours_with(store: Path) -> Server:
    """Choose the engine as the server does, but at once and in the foreground."""
    program = Path(sys.executable).with_name("dne-serve")
    command = [program, "--store", store, "--threads", THREADS, "--measure", "--json"]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    print(f"{OURS} computes by {told['engine']}: {told['figures']}", file=sys.stderr)
    return Server(
        name=OURS,
        command=(
            *("python", "-m", "benchmarks.serving.hand_made", told["engine"]),
            *("--store", "{store}", "--port", "{port}", "--threads", str(THREADS)),
        ),
    )


def peers_with(files: dict[str, Path]) -> tuple[Server, ...]:
    """Give two model servers every form of the network."""
    both = (PEERS[0], MLSERVER)
    return tuple(
        replace(
            server,
            name=f"{server.name}, {form}",
            software=server.name,
            variables={**server.variables, **({"BENCH_FORM": str(path)} if path.name else {})},
        )
        for server in both
        for form, path in files.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What was seen of a server in one turn."""

    per_second: float
    processor_ms: float
    """Of an answered request."""
    failed: int


Seen = dict[tuple[str, str, int], list[Turn]]
"""Turns by server, size of the photo and connections."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument(
        "--backbone", action="append", required=True, metavar="NAME=FILE", help="its weights"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--photos", type=Path, metavar="DIR", help="a folder of photos a class")
    source.add_argument("--cifar", type=Path, metavar="ZIP", help="CIFAR-100, a folder a class")
    parser.add_argument("--turns", type=int, default=3, help="that each server takes")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load in a turn")
    parser.add_argument("--without", action="append", default=[], help="a peer to leave out")
    parser.add_argument("--keep", type=Path, help="folder for what was learnt, for another run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    figures: list[Figure] = []
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        photos = options.photos or enlarged(options.cifar, Path(name, "photos"))
        for one in options.backbone:
            backbone, _, file = one.partition("=")
            folder = Path(options.keep or name, backbone)
            seen = measure(backbone, Path(file), photos, folder, options)
            found, told = judged(backbone, seen)
            figures, measured = figures + found, measured | told
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def measure(
    backbone: str, file: Path, photos: Path, folder: Path, options: argparse.Namespace
) -> Seen:
    """Learn a version, and ask ours and each peer in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    store = learn(file, photos, folder)
    images = {size: jpeg(photos, pixels) for size, pixels in SIZES.items()}
    files = {"PyTorch": Path(), **exported(store, folder)}
    chosen, seen = ours_with(store), Seen()
    for peer in peers_with(files):
        if any(peer.name.startswith(one) for one in options.without):
            continue
        first = next(iter(images.values()))
        with (
            running(chosen, store=store, folder=folder, image=first) as ours,
            running(peer, store=store, folder=folder, image=first) as other,
        ):
            for size, image in images.items():
                for connections in CONNECTIONS if image is first else (8,):
                    for _ in range(options.turns):
                        for live in (ours, other):
                            turn = take_turn(
                                replace(live, request=live.server.request(image)),
                                connections=connections,
                                folder=folder,
                                seconds=options.seconds,
                            )
                            seen.setdefault((live.server.name, size, connections), []).append(turn)
                            told = f"{backbone}, {size}, {connections}: {live.server.name} {turn}"
                            print(told, file=sys.stderr, flush=True)
    return seen


def take_turn(live: Running, *, connections: int, folder: Path, seconds: float) -> Turn:
    before_s = live.processor_s()
    seen = ask(live, connections=connections, folder=folder, seconds=seconds, settle_s=0.0)
    answered = max(1, len(seen.with_status(200)))
    return Turn(
        per_second=seen.per_second,
        processor_ms=1000 * (live.processor_s() - before_s) / answered,
        failed=seen.failed,
    )


def judged(backbone: str, seen: Seen) -> tuple[list[Figure], dict[str, float]]:
    """Compare ours with the best peer, and with the best one that has 8 bits."""
    others = list(dict.fromkeys(name for name, _, _ in seen if name != OURS))
    reduced = [name for name in others if "int8" in name]
    whole = [name for name in others if name not in reduced]
    figures, measured = [], {}
    for (name, size, connections), turns in seen.items():
        what = f"{backbone}, {size}, {name}, {connections} connections"
        measured[f"requests/s, {what}"] = median(one.per_second for one in turns)
        measured[f"processor ms, {what}"] = median(one.processor_ms for one in turns)
        measured[f"failed, {what}"] = float(sum(one.failed for one in turns))
    for size, connections in dict.fromkeys((size, count) for _, size, count in seen):
        for peers, called, asked in (
            (whole, "in single precision", 1.8),
            (reduced, "in 8 bits", 1.2),
        ):
            if not peers:
                continue
            least = min(ratio(seen, name, size, connections) for name in peers)
            what = f"{backbone}, {size}, {connections} connections: processor time of the best peer"
            figures.append(at_least(f"{what} {called} ÷ ours", least, asked))
    return figures, measured


def ratio(seen: Seen, other: str, size: str, connections: int) -> float:
    """Divide the processor time of a request of another server by that of ours beside it."""
    turns = seen[other, size, connections]
    names = list(dict.fromkeys(name for name, _, _ in seen if name != OURS))
    begin = names.index(other) * len(turns)
    ours = seen[OURS, size, connections][begin : begin + len(turns)]
    return median(
        theirs.processor_ms / own.processor_ms for own, theirs in zip(ours, turns, strict=True)
    )


def learn(file: Path, photos: Path, folder: Path) -> Path:
    store = folder / "models"
    if store.exists():
        return store
    program = Path(sys.executable).with_name("dne-train")
    command = [program, "add-task", "--data", photos, "--pretrained", file, "--store", store]
    subprocess.run([*map(str, command), "--grow", "quick", "--force"], check=True)
    return store


def exported(store: Path, folder: Path) -> dict[str, Path]:
    """Export the version, and quantise it as onnxruntime's documentation does."""
    from onnxruntime import quantization

    program = Path(sys.executable).with_name("dne-store")
    out = folder / "onnx"
    command = [program, "export-onnx", "1", "--store", store, "--out", out]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    whole, reduced = next(out.glob("version-*.onnx")), out / "int8.onnx"
    named = out / "named.onnx"
    stacked = _name_nodes(whole, named)
    kind = quantization.QuantType.QInt8
    quantization.quantize_dynamic(
        named, reduced, per_channel=True, weight_type=kind, nodes_to_exclude=stacked
    )
    return {"onnxruntime": whole, "onnxruntime int8": reduced}


def _name_nodes(path: Path, named: Path) -> list[str]:
    """Name the nodes, and list those that multiply by stacked matrices: onnxruntime has no 8-bit
    product with a scale a channel for them."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    flat = {one.name for one in model.graph.initializer if len(one.dims) == 2}
    weights = {one.name for one in model.graph.initializer}
    stacked = []
    for number, node in enumerate(model.graph.node):
        node.name = f"node-{number}"
        if node.op_type == "MatMul" and set(node.input) & weights - flat:
            stacked.append(node.name)
    onnx.save(model, named)
    return stacked


def enlarged(archive: Path, folder: Path, *, count: int = CLASSES) -> Path:
    """Write some classes of CIFAR-100 as photos."""
    with zipfile.ZipFile(archive) as images:
        names = [one for one in images.namelist() if one.startswith("train/") and "." in one]
        classes = sorted({name.split("/")[1] for name in names})
        for label in random.Random(0).sample(classes, count):
            (folder / label).mkdir(parents=True)
            of_class = sorted(name for name in names if name.split("/")[1] == label)
            for number, name in enumerate(of_class[:IMAGES]):
                path = folder / label / f"{number:03d}.jpg"
                small = Image.open(io.BytesIO(images.read(name)))
                path.write_bytes(noisy_jpeg(small, SIZES["0.3 megapixels"]))
    return folder


def jpeg(photos: Path, size: tuple[int, int]) -> bytes:
    """Scale the first photo to a size, as a JPEG."""
    first = min(path for path in photos.glob("*/*") if path.is_file())
    return noisy_jpeg(Image.open(first), size)


def noisy_jpeg(image: Image.Image, size: tuple[int, int]) -> bytes:
    large = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    noise = np.random.default_rng(0).integers(-NOISE, NOISE + 1, large.shape, dtype=np.int16)
    data = io.BytesIO()
    Image.fromarray((large + noise).clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=88)
    return data.getvalue()


if __name__ == "__main__":
    sys.exit(main())
