"""Describe the shape of a network as plain data, without torch. Any spec that exists can be built.

A spec names every tensor and its shape, so that a shard is checked before a tensor is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Literal, get_args

from model_store.errors import SpecInvalid
from model_store.names import check_name

Shape = tuple[int, ...]
Token = Literal["class-attention", "in-sequence"]
"""`class-attention`: the token has a block of its own that reads the patches. `in-sequence`: the
token is one position among the patches."""
Attention = Literal["plain", "gated"]
"""The attention of patches: `plain` by content; `gated` by content and place, mixed by a gate."""
Stem = Literal["patches", "convolutions"]
"""The way from an image to rows of patches: `patches` embeds each patch by itself; `convolutions`
halves the image step by step, so that patches know their neighbours."""
Activation = Literal["gelu", "quick-gelu", "tanh-gelu", "swiglu"]
"""The function between the linear layers of a block. `swiglu`: the first layer writes a gate g and
a value v, and the second reads silu(g)·v."""
Pooling = Literal["token", "mean", "token-and-mean", "attention"]
"""The slice of a backbone: its token after the last norm; the mean of its patches, then the norm;
its token and the mean of its patches side by side, both after the norm; or the answer of a learnt
query to its patches, in a class-attention block without a norm after."""

_MAX_SIZE = 1 << 16  # of any number in a spec: a hostile manifest must not ask for the moon
MAX_DEPTH = 1024
_MAX_PATCHES = 1 << 16  # of an image: the time of a pass grows with their square
_MAX_REGISTERS = 1024
_MAX_GRID = 16  # cells a side of a readout
MAX_TASKS = 1000
_MAX_PARAMETERS = 1 << 31  # of one network
_MAX_STEM_SIDE = 1024
"""Pixels of the side of an image whose stem is convolutions."""
_SMALL_IMAGE = 32
"""The largest side of an image whose stem begins with a convolution of its full size."""
MAX_PLACES = 1 << 28  # of one network: the folded form keeps a weight for each pair of patches


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """The ways in which a pre-trained first expert differs from the plain transformer.

    Younger experts are plain: they have no registers, and read none.
    """

    registers: int = 0
    """Rows after the patches that hold no patch and that only the backbone itself reads."""
    rotary: bool = False
    """Queries and keys of patches are turned by angles that depend on their places."""
    activation: Activation = "gelu"
    pre_norm: bool = False
    """A LayerNorm stands before the first block."""
    qk_norm: bool = False
    """A LayerNorm stands on the queries and keys of each attention head."""
    hidden_norm: int = 0
    """The first hidden channels, which are standardised after the activation; 0: none is. The
    channels after them are zero."""
    pooling: Pooling = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.registers <= _MAX_REGISTERS:
            raise SpecInvalid(f"registers must be between 0 and {_MAX_REGISTERS}")
        if self.hidden_norm < 0:
            raise SpecInvalid("hidden_norm must be 0 or more")
        for what, value, known in (
            ("activation", self.activation, get_args(Activation)),
            ("pooling", self.pooling, get_args(Pooling)),
        ):
            if value not in known:
                raise SpecInvalid(f"{what} {value!r} is not one of {', '.join(known)}")
        others = (self.registers, self.rotary, self.qk_norm, self.hidden_norm)
        if self.pooling == "attention" and any(others):
            raise SpecInvalid(
                "a backbone with attention pooling has no registers, no rotary positions, and no "
                "norms of queries and keys or of hidden channels"
            )

    @property
    def pools_patches(self) -> bool:
        """Return whether the last block computes every row, because the slice has their mean."""
        return self.pooling in ("mean", "token-and-mean")


PLAIN = Backbone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """The features of earlier blocks in the slice of a pre-trained first expert.

    The output rows of each block are normalised without scale and bias. The slice holds the token's
    row, where the token is in the sequence, and the mean of the patches.
    """

    blocks: tuple[int, ...]
    """Numbers of blocks, counted from 1, in rising order."""
    grid_block: int = 0
    """The block whose grid-cell means are also in the slice; 0: none."""
    grid: int = 0
    """Cells of a side of the grid."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks or list(self.blocks) != sorted({*self.blocks}):
            raise SpecInvalid("the blocks of a readout must be distinct numbers in rising order")
        if not self.blocks[0] >= 1 or self.blocks[-1] > MAX_DEPTH:
            raise SpecInvalid(f"a block of a readout must be between 1 and {MAX_DEPTH}")
        if not 0 <= self.grid <= _MAX_GRID:
            raise SpecInvalid(f"the grid of a readout must be between 0 and {_MAX_GRID}")
        if bool(self.grid) != bool(self.grid_block):
            raise SpecInvalid("a readout has both grid and grid_block, or neither")
        if self.grid and self.grid_block not in self.blocks:
            raise SpecInvalid(f"grid_block {self.grid_block} is not one of the readout's blocks")

    def cells_of(self, block: int) -> int:
        """Count the cells of the grid that the slice holds of a block."""
        return self.grid**2 if block == self.grid_block else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The parameters added for one task.

    Younger experts read `heads` slices of `head_width` channels. The expert's spatial attention may
    be cut into another number of heads, as in a pre-trained transformer.
    """

    heads: int
    attention_heads: int = 0
    """As many as `heads` if 0."""

    def __post_init__(self) -> None:
        _check_size("heads of an expert", self.heads)
        if self.attention_heads == 0:
            object.__setattr__(self, "attention_heads", self.heads)
        _check_size("attention heads of an expert", self.attention_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A named set of classes learnt together, and the expert that was added for it.

    A task without an expert has a task head only, which reads the experts that were there.
    """

    name: str
    classes: tuple[str, ...]
    expert: ExpertSpec | None

    def __post_init__(self) -> None:
        check_name(self.name, what="the task name")
        if not self.classes:
            raise SpecInvalid(f"task {self.name!r} has no classes")
        for name in self.classes:
            check_name(name, what="the class name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of a stem, with a square kernel and a bias."""

    reads: int
    writes: int
    """Channels."""
    side: int
    """Pixels of the kernel's side."""
    stride: int
    padding: int = 0

    @property
    def shape(self) -> Shape:
        """Return the shape of its weight."""
        return (self.writes, self.reads, self.side, self.side)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRun:
    """Neighbouring experts of equal shape, which are computed together.

    The first expert is a run of its own, because it reads no other expert.
    """

    experts: range
    before: int
    """Heads of all experts before the run; 0 for the first expert."""
    heads: int
    """Heads of each expert."""
    attention_heads: int
    width: int
    """Channels of each expert."""

    @property
    def end(self) -> int:
        """Count the heads of the network up to the last expert of this run."""
        return self.before + len(self.experts) * self.heads

    @property
    def is_first(self) -> bool:
        return self.before == 0

    def sources(self, slot: int) -> int:
        """Count the heads that the expert at this place of the run reads, with its own."""
        return self.before + (slot + 1) * self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The geometry, fixed by the first task, and the tasks in the order of learning."""

    image_size: int
    patch_size: int
    depth: int
    """Number of patch blocks. A token in class attention has one more block after them."""
    head_width: int = 32
    mlp_ratio: int = 4
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    token: Token = "class-attention"
    attention: Attention = "plain"
    stem: Stem = "patches"
    backbone: Backbone | None = None
    """None: the first expert is a plain transformer."""
    readout: Readout | None = None
    """None: the first expert's slice is of its last block alone."""
    tasks: tuple[TaskSpec, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tasks) > MAX_TASKS:
            raise SpecInvalid(f"a network of {len(self.tasks)} tasks is too large")
        for what in ("image_size", "patch_size", "depth", "head_width", "mlp_ratio"):
            _check_size(what, getattr(self, what))
        if self.depth > MAX_DEPTH:
            raise SpecInvalid(f"depth must be between 1 and {MAX_DEPTH}, not {self.depth}")
        if self.image_size % self.patch_size:
            raise SpecInvalid(
                f"an image of {self.image_size} pixels "
                f"cannot be cut into patches of {self.patch_size}"
            )
        if self.patches > _MAX_PATCHES:
            raise SpecInvalid(
                f"an image of {self.patches} patches is too large: at most {_MAX_PATCHES}; patches "
                f"of {self.patch_size} pixels are too small for images of {self.image_size}"
            )
        if not 0 < self.layer_norm_eps < 1:
            raise SpecInvalid(f"layer_norm_eps {self.layer_norm_eps} is not between 0 and 1")
        if self.token not in get_args(Token):
            raise SpecInvalid(f"token {self.token!r} is not one of {', '.join(get_args(Token))}")
        self._check_stem()
        self._check_attention()
        self._check_experts()
        self._check_backbone()
        self._check_readout()
        _check_distinct("class", self.classes)
        _check_distinct("task", (task.name for task in self.tasks))
        if self.parameters > _MAX_PARAMETERS:
            raise SpecInvalid(f"a network of {self.parameters} parameters is too large")

    def _check_experts(self) -> None:
        if self.tasks and self.tasks[0].expert is None:
            raise SpecInvalid("the first task has no expert")
        for expert in self.experts:
            width = expert.heads * self.head_width
            if width % expert.attention_heads:
                raise SpecInvalid(
                    f"{width} channels cannot be cut into {expert.attention_heads} attention heads"
                )

    def _check_stem(self) -> None:
        if self.stem not in get_args(Stem):
            raise SpecInvalid(f"stem {self.stem!r} is not one of {', '.join(get_args(Stem))}")
        if self.stem == "patches":
            return
        if self.is_pretrained:
            raise SpecInvalid("a pre-trained first expert has a stem of patches")
        if not can_be_convolved(self.image_size, self.patch_size):
            raise SpecInvalid(
                f"a stem of convolutions halves an image of at most {_MAX_STEM_SIDE} pixels until "
                "the patches of 2, 4, 8, 16 … pixels are left; it makes no patches of "
                f"{self.patch_size} pixels of an image of {self.image_size}"
            )

    def _check_attention(self) -> None:
        if self.attention not in get_args(Attention):
            known = ", ".join(get_args(Attention))
            raise SpecInvalid(f"attention {self.attention!r} is not one of {known}")
        if self.attention == "plain":
            return
        if self.token == "in-sequence":
            raise SpecInvalid("gated attention has no place for a token in the sequence")
        heads = sum(expert.attention_heads for expert in self.experts)
        if max(1, heads) * self.depth * self.patches**2 > MAX_PLACES:
            raise SpecInvalid(f"gated attention among {self.patches} patches is too large")

    def _check_backbone(self) -> None:
        if self.backbone is None:
            return
        if self.backbone == PLAIN:
            raise SpecInvalid("a plain backbone is not described")
        pooled = self.backbone.pooling == "attention"
        if pooled != (self.token == "class-attention") or self.attention != "plain":
            raise SpecInvalid(
                f"a backbone with {self.backbone.pooling} pooling does not go with token "
                f"{self.token!r} and {self.attention} attention"
            )
        if self.backbone.rotary and self.tasks and self._attention_width % 2:
            raise SpecInvalid("rotary attention heads have an even number of channels")
        if self.tasks and self.backbone.hidden_norm > self.width_of(0) * self.mlp_ratio:
            raise SpecInvalid("hidden_norm is more than the hidden channels")

    def _check_readout(self) -> None:
        if self.readout is None:
            return
        if not self.is_pretrained:
            raise SpecInvalid("only a pre-trained first expert has a readout of several blocks")
        if self.readout.blocks[-1] >= self.depth:
            raise SpecInvalid(
                f"a readout of block {self.readout.blocks[-1]} does not go with a depth of "
                f"{self.depth}: the last block is read anyway"
            )
        if self.readout.grid > self.image_size // self.patch_size:
            raise SpecInvalid("the grid of a readout has more cells a side than there are patches")

    @property
    def first(self) -> Backbone:
        """Describe the first expert."""
        return self.backbone or PLAIN

    @property
    def _attention_width(self) -> int:
        """Count the channels of an attention head of the first expert."""
        return self.width_of(0) // self.experts[0].attention_heads

    @property
    def experts(self) -> tuple[ExpertSpec, ...]:
        """List the experts, oldest first. An expert's index is its place here."""
        return tuple(task.expert for task in self.tasks if task.expert is not None)

    @property
    def is_pretrained(self) -> bool:
        """Return whether the first expert was pre-trained.

        Only then is the token in the sequence, or the first expert described as a backbone.
        """
        return self.token == "in-sequence" or self.backbone is not None

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def positions(self) -> int:
        """Count the rows of an image in a patch block: the patches, and a token in the sequence."""
        return self.patches + (self.token == "in-sequence")

    def positions_of(self, index: int) -> int:
        """Count the rows of an image in a patch block of an expert, with its registers."""
        return self.positions + (0 if index else self.first.registers)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Name the blocks of an expert, in the order of computation."""
        patch_blocks = tuple(f"blocks.{layer}" for layer in range(self.depth))
        return patch_blocks if self.token == "in-sequence" else (*patch_blocks, "class_block")

    @property
    def hidden_width(self) -> int:
        """Return the width of a head between the two linear layers of a block (the paper's D')."""
        return self.head_width * self.mlp_ratio

    @property
    def classes(self) -> tuple[str, ...]:
        """List all classes in the order of the logits: task by task."""
        return tuple(name for task in self.tasks for name in task.classes)

    @property
    def tasks_of_newest_expert(self) -> tuple[TaskSpec, ...]:
        """List the tasks that the newest expert was learnt for: those since the one before it."""
        with_expert = [place for place, task in enumerate(self.tasks) if task.expert is not None]
        begin = with_expert[-2] + 1 if len(with_expert) > 1 else 0
        return self.tasks[begin : with_expert[-1] + 1]

    @property
    def classes_of_newest_expert(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks_of_newest_expert for name in task.classes)

    @property
    def tasks_without_expert(self) -> tuple[TaskSpec, ...]:
        """List the tasks since the newest expert, for which none was learnt."""
        with_expert = [place for place, task in enumerate(self.tasks) if task.expert is not None]
        return self.tasks[with_expert[-1] + 1 :]

    @property
    def token_width(self) -> int:
        own = sum(expert.heads for expert in self.experts) * self.head_width
        return own + (self.slice_width(0) - self.width_of(0) if self.tasks else 0)

    def width_of(self, index: int) -> int:
        """Count the channels of an expert."""
        return self.experts[index].heads * self.head_width

    def slice_width(self, index: int) -> int:
        """Count the channels of an expert's slice of the token."""
        return self.width_of(index) if index else self.narrow_width + self.readout_width

    @property
    def narrow_width(self) -> int:
        """Count the first channels of the token, which are of the first expert's last block."""
        return self.width_of(0) * (2 if self.first.pooling == "token-and-mean" else 1)

    @property
    def readout_width(self) -> int:
        """Count the channels of earlier blocks, which come next."""
        blocks = self.readout.blocks if self.readout else ()
        return self.width_of(0) * sum(self.readout_rows(block) for block in blocks)

    def readout_rows(self, block: int) -> int:
        """Count the rows, of the first expert's width, that the slice holds of an earlier block."""
        cells = self.readout.cells_of(block) if self.readout else 0
        return int(self.token == "in-sequence") + 1 + cells

    def source_heads(self, index: int) -> int:
        """Count the heads that expert `index` reads: those of all older experts and its own."""
        return sum(expert.heads for expert in self.experts[: index + 1])

    def convolutions(self, width: int) -> tuple[Convolution, ...]:
        """List the convolutions from an image to the rows of patches of an expert of this width; a
        ReLU stands between each two.

        A stem of convolutions for patches of 8 pixels and 128 channels writes 32, 64 and 128
        channels with strides 2, 2 and 2. In a small image a convolution of its full size comes
        first: it writes 32, 64, 64 and 128 channels with strides 1, 2, 2 and 2.
        """
        side = self.patch_size
        if self.stem == "patches":
            return (Convolution(reads=3, writes=width, side=side, stride=side),)
        strides = [2] * (side.bit_length() - 1)
        if self.image_size <= _SMALL_IMAGE:
            strides = [1, *strides]
        middle = [max(32, width // 2)] * (len(strides) - 2)
        writes = [max(16, width // 4), *middle, width][-len(strides) :]
        return tuple(
            Convolution(reads=reads, writes=written, side=3, stride=stride, padding=1)
            for reads, written, stride in zip([3, *writes], writes, strides, strict=False)
        )

    def expand(self, task: TaskSpec) -> NetworkSpec:
        return replace(self, tasks=(*self.tasks, task))

    def deepen(self, expert: ExpertSpec) -> NetworkSpec:
        """Add an expert to the newest task, which has none."""
        *older, newest = self.tasks
        if newest.expert is not None:
            raise SpecInvalid(f"task {newest.name!r} has an expert")
        return replace(self, tasks=(*older, replace(newest, expert=expert)))

    def until(self, experts: int) -> NetworkSpec:
        """Keep the tasks up to that of the last of these `experts`."""
        last = 0
        for place, task in enumerate(self.tasks, start=1):
            if experts and task.expert is not None:
                last, experts = place, experts - 1
        return replace(self, tasks=self.tasks[:last])

    def runs(self) -> tuple[ExpertRun, ...]:
        """Group neighbouring experts of equal shape; the first expert stays alone.

        Experts of 12, 1, 1, 1 and 2 heads make the runs (0), (1, 2, 3) and (4).
        """
        runs: list[ExpertRun] = []
        first, before = 0, 0
        for _, group in groupby(
            enumerate(self.experts), key=lambda numbered: (numbered[0] == 0, numbered[1])
        ):
            alike = [expert for _, expert in group]
            run = ExpertRun(
                experts=range(first, first + len(alike)),
                before=before,
                heads=alike[0].heads,
                attention_heads=alike[0].attention_heads,
                width=alike[0].heads * self.head_width,
            )
            runs.append(run)
            first, before = run.experts.stop, run.end
        return tuple(runs)

    def run_of(self, index: int) -> ExpertRun:
        """Find the run that expert `index` stands in."""
        return next(run for run in self.runs() if index in run.experts)

    @property
    def parameters(self) -> int:
        # Naming every tensor of a hostile spec would take minutes, so the tensors are not named.
        sources = accumulate(expert.heads for expert in self.experts)
        known: dict[tuple[bool, ExpertSpec], tuple[int, int, int]] = {}
        total = 0
        for index, (expert, heads) in enumerate(zip(self.experts, sources, strict=True)):
            kind = (index == 0, expert)
            if kind not in known:
                known[kind] = self._counts(index)
            edge, block, per_source = known[kind]
            total += edge + len(self.blocks) * (block + per_source * heads)
        return total + len(self.classes) * (self.token_width + 1)

    def _counts(self, index: int) -> tuple[int, int, int]:
        """Count the parameters of expert `index`: outside its blocks with its gates, of a block
        that reads no head, and of a block for each head that it reads."""
        without, one = (_count(self._block_tensors(index, sources)) for sources in (0, 1))
        edge = _count(self._edge_tensors(index)) + self.depth * _count(self._gate_tensors(index))
        return edge, without, one - without

    def expert_tensors(self, index: int) -> dict[str, Shape]:
        """Return the name and shape of every tensor in the shard of expert `index`."""
        names = self._edge_tensors(index)
        in_block = self._block_tensors(index, self.source_heads(index))
        in_patch_block = in_block | self._gate_tensors(index)
        for layer, block in enumerate(self.blocks):
            tensors = in_patch_block if layer < self.depth else in_block
            names |= {f"{block}.{name}": shape for name, shape in tensors.items()}
        return {f"experts.{index}.{name}": shape for name, shape in names.items()}

    def classifier_tensors(self) -> dict[str, Shape]:
        """Return the name and shape of every tensor in the classifier shard."""
        tensors: dict[str, Shape] = {}
        width = self.token_width
        for index, task in enumerate(self.tasks):
            tensors[f"heads.{index}.weight"] = (len(task.classes), width)
            tensors[f"heads.{index}.bias"] = (len(task.classes),)
        return tensors

    @property
    def doubt_width(self) -> int:
        """Count the channels that doubt is judged by: those of the oldest expert's last block."""
        return self.narrow_width

    def doubt_tensors(self) -> dict[str, Shape]:
        """Return the name and shape of every tensor in a doubt shard."""
        width, classes = self.doubt_width, len(self.classes)
        return {
            "doubt.shift": (width,),
            "doubt.project": (width, width),
            "doubt.bias": (width,),
            "doubt.prototypes": (classes, width),
            "doubt.offsets": (classes,),
        }

    def _edge_tensors(self, index: int) -> dict[str, Shape]:
        """Return the tensors before and after the blocks of an expert."""
        width = self.width_of(index)
        tensors: dict[str, Shape] = {
            **self._stem_tensors(index),
            "position": (self.positions_of(index), width),
            "token": (width,),
            "norm.weight": (width,),
            "norm.bias": (width,),
        }
        return tensors if index else self._with_backbone_edges(tensors)

    def _stem_tensors(self, index: int) -> dict[str, Shape]:
        *stem, last = self.convolutions(self.width_of(index))
        tensors: dict[str, Shape] = {}
        for place, convolution in enumerate((*stem, last)):
            name = f"stem.{place}" if place < len(stem) else "patch_embed"
            tensors |= {f"{name}.weight": convolution.shape, f"{name}.bias": (convolution.writes,)}
        return tensors

    def _with_backbone_edges(self, tensors: dict[str, Shape]) -> dict[str, Shape]:
        width = self.width_of(0)
        if self.first.pooling == "attention":
            tensors = {name: tensors[name] for name in tensors if not name.startswith("norm.")}
        if self.first.pre_norm:
            tensors |= {"pre_norm.weight": (width,), "pre_norm.bias": (width,)}
        if self.first.rotary:
            tensors["rotary.angles"] = (self.patches, self._attention_width // 2)
        return tensors

    def _gate_tensors(self, index: int) -> dict[str, Shape]:
        """Return the tensors that a patch block has besides those of every block."""
        if self.attention == "plain":
            return {}
        heads = self.experts[index].attention_heads
        return {"attention.gate": (heads,), "attention.locality": (heads, 3)}

    def _block_tensors(self, index: int, sources: int) -> dict[str, Shape]:
        width, narrow, wide = self.width_of(index), self.head_width, self.hidden_width
        tensors: dict[str, Shape] = {
            "norm1.weight": (width,),
            "norm1.bias": (width,),
            "attention.qkv.weight": (3 * width, width),
            "attention.out.weight": (width, width),
            "attention.out.bias": (width,),
            "norm2.weight": (width,),
            "norm2.bias": (width,),
        }
        if self.qkv_bias:
            tensors["attention.qkv.bias"] = (3 * width,)
        if index == 0 and self.first.qk_norm:
            for part in ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"):
                tensors[f"attention.{part}"] = (self._attention_width,)
        for name, read, written in (("widen", narrow, wide), ("narrow", wide, narrow)):
            if index == 0:
                heads = self.experts[0].heads
                gated = 2 if name == "widen" and self.first.activation == "swiglu" else 1
                tensors[f"{name}.weight"] = (gated * heads * written, heads * read)
                tensors[f"{name}.bias"] = (gated * heads * written,)
            else:
                tensors[f"{name}.query"] = (read, read)
                tensors[f"{name}.key"] = (read, read)
                tensors[f"{name}.value"] = (sources, read, written)
                tensors[f"{name}.value_bias"] = (sources, written)
                tensors[f"{name}.scale"] = (self.experts[index].heads,)
        return tensors


def can_be_convolved(image_size: int, patch_size: int) -> bool:
    """Return whether a stem of convolutions can make such patches."""
    return 2 <= patch_size == patch_size & -patch_size and image_size <= _MAX_STEM_SIDE


def statistics_tensors(*, images: int, width: int) -> dict[str, Shape]:
    """Return the tensors of a shard with the statistics of a class: see FORMAT.md."""
    return {"mean": (width,), "factor": (min(images - 1, width), width)}


def _count(tensors: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())


def _check_size(what: str, value: int) -> None:
    if not 1 <= value <= _MAX_SIZE:
        raise SpecInvalid(f"{what} must be between 1 and {_MAX_SIZE}, not {value}")


def _check_distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecInvalid(f"{what} {name!r} is repeated")
        seen.add(name)
