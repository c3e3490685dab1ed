"""The network straight from the paper's equations, in plain loops over positions and heads.

An independent computation to hold the modules against: it shares no code with them but the
parameters, and spells out what they re-associate (keys, values, the softmax over heads).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.network.network import Network

Weights = dict[str, Tensor]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean = x.sum() / x.numel()
    variance = ((x - mean) ** 2).sum() / x.numel()
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def softmax(scores: list[Tensor]) -> list[Tensor]:
    total = sum((torch.exp(score) for score in scores), torch.zeros(()))
    return [torch.exp(score) / total for score in scores]


def task_attention(sources: list[list[Tensor]], weights: Weights, name: str) -> list[Tensor]:
    """`sources[e][h]`: head h of expert e at one position. Gives the own heads' outputs."""
    query, key = weights[f"{name}.query"], weights[f"{name}.key"]
    value, bias = weights[f"{name}.value"], weights[f"{name}.value_bias"]
    everyone = [head for expert in sources for head in expert]
    outputs = []
    for i, own in enumerate(sources[-1]):
        q = query @ own
        scores = [torch.dot(q, key @ other) / math.sqrt(len(own)) for other in everyone]
        attention = softmax(scores)
        mixed = torch.zeros(value.shape[2])
        for j, other in enumerate(everyone):
            mixed = mixed + attention[j] * (value[j].T @ other + bias[j])
        outputs.append(weights[f"{name}.scale"][i] * mixed)
    return outputs


def gated(attention: list[Tensor], weights: Weights, name: str, h: int, query: int) -> list[Tensor]:
    """Mix the attention of head h with ConViT's attention by place, where the block has a gate."""
    if f"{name}.gate" not in weights:
        return attention
    side = math.isqrt(len(attention))
    scores = []
    for key in range(len(attention)):
        x, y = key % side - query % side, key // side - query // side
        way = torch.tensor([x, y, x * x + y * y], dtype=attention[0].dtype)
        scores.append(torch.dot(weights[f"{name}.locality"][h], way))
    gate = 1 / (1 + torch.exp(-weights[f"{name}.gate"][h]))
    return [
        (1 - gate) * one + gate * other
        for one, other in zip(attention, softmax(scores), strict=True)
    ]


def spatial_attention(
    xs: list[Tensor], weights: Weights, name: str, heads: int, queries: int
) -> list[Tensor]:
    width = len(xs[0])
    head_width = width // heads
    bias = weights.get(f"{name}.qkv.bias", torch.zeros(3 * width))
    triples = [weights[f"{name}.qkv.weight"] @ x + bias for x in xs]
    outputs = []
    for p in range(queries):
        parts = []
        for h in range(heads):
            span = slice(h * head_width, (h + 1) * head_width)
            q = triples[p][:width][span]
            scores = [
                torch.dot(q, t[width : 2 * width][span]) / math.sqrt(head_width) for t in triples
            ]
            attention = gated(softmax(scores), weights, name, h, p)
            parts.append(
                sum(
                    (a * t[2 * width :][span] for a, t in zip(attention, triples, strict=True)),
                    torch.zeros(head_width),
                )
            )
        outputs.append(
            weights[f"{name}.out.weight"] @ torch.cat(parts) + weights[f"{name}.out.bias"]
        )
    return outputs


def block(
    network: Network, weights: Weights, name: str, states: list[list[Tensor]]
) -> list[list[Tensor]]:
    """One block of all experts; `states[e]` are positions, for a class block the token first."""
    spec, eps = network.spec, network.spec.layer_norm_eps
    is_class = name == "class_block"
    attended: list[list[Tensor]] = []
    for e, xs in enumerate(states):
        here = f"experts.{e}.{name}"
        normed = [
            layer_norm(x, weights[f"{here}.norm1.weight"], weights[f"{here}.norm1.bias"], eps)
            for x in xs
        ]
        queries = 1 if is_class else len(xs)
        read = spatial_attention(
            normed, weights, f"{here}.attention", spec.experts[e].attention_heads, queries
        )
        attended.append([x + r for x, r in zip(xs, read, strict=False)])
    results: list[list[Tensor]] = [[] for _ in states]
    for p in range(len(attended[0])):
        narrow: list[list[Tensor]] = []
        wide: list[list[Tensor]] = []
        for e, positions in enumerate(attended):
            here = f"experts.{e}.{name}"
            s = positions[p]
            n = layer_norm(s, weights[f"{here}.norm2.weight"], weights[f"{here}.norm2.bias"], eps)
            narrow.append(list(n.split(spec.head_width)))
            if e == 0:
                o = gelu(weights[f"{here}.widen.weight"] @ n + weights[f"{here}.widen.bias"])
                wide.append(list(o.split(spec.hidden_width)))
                added = weights[f"{here}.narrow.weight"] @ o + weights[f"{here}.narrow.bias"]
            else:
                wide.append([gelu(o) for o in task_attention(narrow, weights, f"{here}.widen")])
                added = torch.cat(task_attention(wide, weights, f"{here}.narrow"))
            results[e].append(s + added)
    return results


def through_stem(
    network: Network, weights: Weights, e: int, image: Tensor
) -> tuple[Tensor, int, int]:
    """What the embedding reads, and the side and the stride of its windows."""
    spec = network.spec
    if spec.stem == "patches":
        return image, spec.patch_size, spec.patch_size
    features, layers = image, spec.patch_size.bit_length() - 2 + (spec.image_size <= 32)
    for layer in range(layers):
        kernel = weights[f"experts.{e}.stem.{layer}.weight"].flatten(1)
        bias = weights[f"experts.{e}.stem.{layer}.bias"]
        stride = 1 if layer == 0 and spec.image_size <= 32 else 2
        padded, places = F.pad(features, (1, 1, 1, 1)), range(0, features.shape[1], stride)
        rows = [
            torch.stack(
                [kernel @ padded[:, y : y + 3, x : x + 3].flatten() + bias for x in places], dim=1
            )
            for y in places
        ]
        features = torch.stack(rows, dim=1).clamp_min(0)
    return F.pad(features, (1, 1, 1, 1)), 3, 2


def logits(network: Network, weights: Weights, image: Tensor) -> Tensor:
    """Logits of one image [3, S, S], with `weights` named as in the network's state."""
    spec = network.spec
    count = spec.image_size // spec.patch_size
    states: list[list[Tensor]] = []
    for e in range(len(spec.experts)):
        place = weights[f"experts.{e}.position"]
        in_sequence = spec.token == "in-sequence"
        positions = [weights[f"experts.{e}.token"] + place[0]] if in_sequence else []
        features, side, stride = through_stem(network, weights, e, image)
        for p in range(count * count):
            row, column = divmod(p, count)
            top, left = row * stride, column * stride
            patch = features[:, top : top + side, left : left + side]
            kernel = weights[f"experts.{e}.patch_embed.weight"].flatten(1)
            embedded = kernel @ patch.flatten() + weights[f"experts.{e}.patch_embed.bias"]
            positions.append(embedded + place[p + in_sequence])
        states.append(positions)
    for layer in range(spec.depth):
        states = block(network, weights, f"blocks.{layer}", states)
    if spec.token == "in-sequence":
        tokens = states
    else:
        with_token = [[weights[f"experts.{e}.token"], *xs] for e, xs in enumerate(states)]
        tokens = block(network, weights, "class_block", with_token)
    slices = [
        layer_norm(
            token[0],
            weights[f"experts.{e}.norm.weight"],
            weights[f"experts.{e}.norm.bias"],
            spec.layer_norm_eps,
        )
        for e, token in enumerate(tokens)
    ]
    whole = torch.cat(slices)
    return torch.cat(
        [
            weights[f"heads.{t}.weight"] @ whole + weights[f"heads.{t}.bias"]
            for t in range(len(spec.tasks))
        ]
    )
