"""First weights, drawn so that they depend on seed and parameter name alone.

A parameter is cut into blocks of 65,536 consecutive elements (row-major). Each block has a random generator of its
own, keyed by seed, canonical parameter name and block number, and is always drawn whole, in float32 on the CPU. So a
rank that holds any part of a parameter gets the values that a single process would give it: nothing depends on world
size, sharding, device or dtype.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.base import InitRule
from models.shards import local_range

BLOCK_ELEMENTS = 65_536


def init_weights(parameters: dict[str, Tensor], *, std: float, seed: int, rules: dict[str, InitRule]) -> None:
    """Fill parameters in place.

    A parameter in `rules` follows its rule. Of the others, those with two or more dimensions (matrices, embeddings)
    are N(0, std) and the rest (biases) 0, whatever their name.

    Args:
        parameters: by canonical name; plain tensors or DTensors that are replicated or sharded on dimension 0,
            unevenly too. Any float dtype, any device.
        std: standard deviation.
        seed: of the weights.
        rules: rules by canonical name (CausalLM.init_rules()).

    Raises:
        ValueError: a parameter is sharded in another way.
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads, torch.no_grad():
        for name, parameter in parameters.items():
            start, stop = local_range(name, parameter)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if name not in rules and parameter.dim() < 2:
                local.zero_()
                continue
            rule = rules.get(name) or partial(_normal, std=std)
            values = np.empty(stop - start, np.float32)
            draw = partial(_fill_block, name, seed, rule, parameter.numel(), values, start)
            first, last = start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)
            list(threads.map(draw, range(first, last)))  # list(): raises what a thread raised
            local.copy_(torch.from_numpy(values).view(local.shape))


def _normal(generator: np.random.Generator, count: int, std: float) -> np.ndarray:
    return generator.standard_normal(count, dtype=np.float32) * np.float32(std)


def _fill_block(
    name: str, seed: int, rule: InitRule, numel: int, values: np.ndarray, values_start: int, block: int
) -> None:
    """Write the part of `block` that falls into `values`, whose first element is element `values_start`."""
    block_start = block * BLOCK_ELEMENTS
    count = min(BLOCK_ELEMENTS, numel - block_start)
    drawn = rule(_generator(seed, name, block), count)
    if drawn.shape != (count,):
        raise ValueError(f"the init rule of {name} gave shape {drawn.shape}, not ({count},)")
    start = max(block_start, values_start)
    stop = min(block_start + count, values_start + values.size)
    values[start - values_start : stop - values_start] = drawn[start - block_start : stop - block_start]


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
