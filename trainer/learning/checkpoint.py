"""Keep the state of a run after each epoch, outside the store, so that the same command goes on.

Each configuration has two files: `<key>.json` tells how far the run has come, and names the
safetensors file beside it by its SHA-256. The JSON is replaced last, so a torn file is never
read. The JSON has a seal, so a checkpoint that another user has written is not used. The state is
the weights, the optimiser's moments and the generator of random changes; the order of the images
follows from the seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Generator, Tensor, nn

from model_store.errors import DneError, NotPrivate
from model_store.host.private import private_folder, read_private, replace_file, seal
from model_store.records.manifest import Scalar
from trainer.learning.losses import Learner
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks

Configuration = Mapping[str, Scalar]

SECONDS_BETWEEN = 1.0
"""The least time between two checkpoints: a second of work is cheaper than many writes."""

MAX_RECORD_BYTES = 1 << 20


class Resumable(Protocol):
    """The state of a phase, which a later run can go on from."""

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state. Raise ValueError for tensors of another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """All state that changes while the network learns."""

    network: Learner
    parameters: Sequence[nn.Parameter]
    optimiser: torch.optim.Optimizer
    changes: Generator
    course: Tensor = field(default_factory=lambda: torch.tensor([0.0, math.inf]).double())
    """How often the rate was halved, and the least mean loss of an epoch."""

    @property
    def halvings(self) -> int:
        return int(self.course[0])

    @property
    def least_loss(self) -> float:
        return float(self.course[1])

    def copied(self) -> dict[str, Tensor]:
        return {name: one.clone() for name, one in self.tensors().items()}

    def go_back(self, good: Mapping[str, Tensor]) -> None:
        """Restore a state, and halve the rate from there."""
        self.load(good)
        self.course[0] += 1

    def tensors(self) -> dict[str, Tensor]:
        kept = {name: one.detach().contiguous() for name, one in self._weights().items()}
        moments: dict[int, dict[str, Tensor]] = self.optimiser.state_dict()["state"]
        kept |= {
            f"optimiser.{index}.{name}": value.contiguous()
            for index, values in moments.items()
            for name, value in values.items()
        }
        kept |= {name: one.contiguous() for name, one in self._buffers().items()}
        return {**kept, "changes": self.changes.get_state(), "course": self.course}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weights: dict[str, Tensor] = {**self._weights(), **self._buffers()}
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                _, index, what = name.split(".")
                moments.setdefault(int(index), {})[what] = value
        shapes = {name: tensors[name].shape for name in weights if name in tensors}
        if shapes != {name: one.shape for name, one in weights.items()}:
            raise ValueError("it holds other tensors")
        with torch.no_grad():
            for name, one in weights.items():
                one.copy_(tensors[name])
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})
        self.changes.set_state(tensors["changes"])
        self.course.copy_(tensors["course"])

    def _buffers(self) -> dict[str, Tensor]:
        return {f"buffer.{name}": one for name, one in self.network.named_buffers()}

    def _weights(self) -> dict[str, nn.Parameter]:
        """Name the weights that any phase changes: a later phase builds on an earlier one."""
        names = {id(one): f"network.{name}" for name, one in self.network.named_parameters()}
        return {
            names.get(id(one), f"extra.{index}"): one
            for index, one in enumerate([*self.network.learnable(), *self.parameters])
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The progress of a run."""

    phase: str
    epochs: int
    """Finished epochs of this phase."""
    past: tuple[str, ...] = ()
    """Finished phases."""
    unit: str = "epoch"
    """The name of a unit of `epochs`."""
    threads: int | None = None
    """The CPU threads of torch: with another number the bits differ."""

    def __str__(self) -> str:
        return f"{self.unit} {self.epochs} of {self.phase}"


class Checkpoint:
    """The checkpoint of one run in `folder`. A folder that cannot be written is not an error."""

    def __init__(
        self,
        folder: Path,
        *,
        configuration: Configuration,
        progress: Progress,
        ranks: Ranks = ALONE,
    ) -> None:
        """Read the checkpoint of the same configuration, and note those of other ones.

        Only the first rank reads and writes; the others get what it has read.
        """
        self.folder = folder
        self.reached: Reached | None = None
        self._configuration = dict(configuration)
        self._progress = progress
        self._record = folder / f"{_key(self._configuration)}.json"
        self._tensors: dict[str, Tensor] = {}
        self._writable = ranks.rank == 0
        self._saved_at = -math.inf
        if ranks.rank == 0 and self._is_private():
            self._note_others()
            if self._record.exists():
                self._take_up()
        if ranks.count > 1:
            self._share(ranks)

    def _is_private(self) -> bool:
        """Return whether the folder is ours alone or can still be made; note it if it is not."""
        try:
            if self.folder.exists():
                private_folder(self.folder)
        except (OSError, NotPrivate) as error:
            self._writable = False
            self._progress.note(f"no checkpoints are kept or used: {error}")
        return self._writable

    def take_threads(self) -> None:
        """Compute in as many threads as the run that is taken up: others make other bits."""
        if self.reached is not None and self.reached.threads is not None:
            torch.set_num_threads(self.reached.threads)

    def is_past(self, phase: str) -> bool:
        """Return whether the earlier run had finished this phase."""
        return self.reached is not None and phase in self.reached.past

    def restore(self, phase: str, state: Resumable) -> int:
        """Restore `state`, and return the finished epochs of `phase`."""
        if self.reached is None or self.reached.phase != phase or not self._tensors:
            return 0
        try:
            state.load(self._tensors)
        except (ValueError, KeyError, RuntimeError) as error:
            raise DneError(
                f"the checkpoint {self._record} does not fit this run; remove it to start anew"
            ) from error
        self._tensors = {}
        return self.reached.epochs

    def save(
        self, phase: str, epochs: int, state: Resumable, *, last: bool, unit: str = "epoch"
    ) -> None:
        """Keep the first and the last epoch of a phase, and others SECONDS_BETWEEN apart."""
        continues = self.reached is not None and self.reached.phase == phase
        too_soon = time.monotonic() - self._saved_at < SECONDS_BETWEEN
        if not self._writable or (continues and too_soon and not last):
            return
        past = self.reached.past if self.reached else ()
        if self.reached and self.reached.phase != phase:
            past = (*past, self.reached.phase)
        reached = Reached(
            phase=phase, epochs=epochs, past=past, unit=unit, threads=torch.get_num_threads()
        )
        try:
            self._write(reached, safetensors.torch.save(state.tensors()))
        except (OSError, NotPrivate) as error:
            self._writable = False
            said = f"{self.folder}: {error.strerror}" if isinstance(error, OSError) else str(error)
            self._progress.note(f"no checkpoints are kept from here on: {said}")
            return
        self.reached, self._saved_at = reached, time.monotonic()

    def remove(self) -> None:
        """Remove the files of this run. Checkpoints of other configurations stay."""
        with suppress(OSError):  # a file that stays is harmless
            for path in self.folder.glob(f"{self._record.stem}*"):
                path.unlink(missing_ok=True)
            self.folder.rmdir()  # fails, as it should, unless the folder is empty

    def _share(self, ranks: Ranks) -> None:
        """Give every rank the state that the first one has read."""
        said = ranks.from_first(json.dumps(self.reached and asdict(self.reached)).encode())
        tensors = ranks.from_first(safetensors.torch.save(self._tensors))
        reached = json.loads(said)
        if ranks.rank and reached is not None:
            self.reached = Reached(**{**reached, "past": tuple(reached["past"])})
            self._tensors = safetensors.torch.load(tensors)

    def _write(self, reached: Reached, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        name = f"{self._record.stem}-{digest[:16]}.safetensors"
        record = {
            "configuration": self._configuration,
            "phase": reached.phase,
            "epochs": reached.epochs,
            "past": list(reached.past),
            "unit": reached.unit,
            "threads": reached.threads,
            "file": name,
            "sha256": digest,
        }
        private_folder(self.folder)
        replace_file(self.folder / name, data)
        replace_file(self._record, _sealed(self._record.name, record))
        for older in self.folder.glob(f"{self._record.stem}-*"):
            if older.name != name:
                older.unlink(missing_ok=True)

    def _take_up(self) -> None:
        try:
            record = _read_record(self._record)
            if record.pop("seal", None) != _seal_of(self._record.name, record):
                raise ValueError("without our seal")
            self._tensors = _read_tensors(self.folder, record)
            self.reached = Reached(
                phase=record["phase"],
                epochs=record["epochs"],
                past=tuple(record["past"]),
                unit=record["unit"],
                threads=record["threads"],
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, NotPrivate):
            self._progress.note(
                f"the checkpoint {self._record} is forged or damaged and is not used: starting anew"
            )
            return
        self._progress.note(f"going on after {self.reached}, from the checkpoint {self._record}")

    def _note_others(self) -> None:
        for path in sorted(self.folder.glob("*.json")):
            if path == self._record:
                continue
            try:
                theirs = _read_record(path)["configuration"]
                differences = _differences(theirs, self._configuration)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, NotPrivate):
                differences = "it cannot be read"
            self._progress.note(
                f"the checkpoint {path} is of another configuration ({differences}): "
                "it is not used, and stays"
            )


def _key(configuration: Configuration) -> str:
    text = json.dumps(configuration, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _differences(theirs: Mapping[str, Any], ours: Configuration) -> str:
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    return ", ".join(
        f"{name} {_brief(theirs.get(name))} there and {_brief(ours.get(name))} here"
        for name in names
    )


def _brief(value: object) -> str:
    return ascii(value)[1:9] if isinstance(value, str) and len(value) == 64 else str(value)


def _read_record(path: Path) -> dict[str, Any]:
    record = json.loads(read_private(path, max_bytes=MAX_RECORD_BYTES))
    if not isinstance(record, dict):
        raise ValueError("not a record")
    return record


def _sealed(name: str, record: Mapping[str, Any]) -> bytes:
    return json.dumps({**record, "seal": _seal_of(name, record)}, indent=1).encode()


def _seal_of(name: str, record: Mapping[str, Any]) -> str:
    return seal(name, json.dumps(record, sort_keys=True).encode()).hex()


def _read_tensors(folder: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    data = (folder / Path(record["file"]).name).read_bytes()
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError("another file")
    return safetensors.torch.load(data)
