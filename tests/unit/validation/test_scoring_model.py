"""Held-out scoring with a real model, against its own logits one window at a time."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.validation import ValConfig
from models.batch import IGNORE_INDEX
from models.init import init_weights
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.data.shards import TokenPool
from trainer.tokenizer import load_tokenizer
from trainer.validation import build_validation
from trainer.validation.token_bytes import token_bytes

SEQ_LEN = 48
ARCH = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny_llama() -> Any:
    config = build_config(ARCH, tokenizer_length=300, special_ids={})
    model = build_model(config, seq_len=SEQ_LEN, attn="sdpa", dtype=torch.float32)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    init_weights(parameters, std=0.2, seed=0, rules=model.init_rules())
    return model


def window_nats(model: Any, input_ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    rows = Rows.empty(1, len(input_ids))
    rows.input_ids[0] = input_ids
    rows.labels.fill(IGNORE_INDEX)
    rows.segment_lengths[0] = np.array([len(input_ids)], np.int64)
    with torch.no_grad():
        logits = model.logits(collate(rows, full_rows=True, pin_memory=False))[0].double().numpy()
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]


def test_a_model_scores_packed_windows_as_one_by_one(
    tiny_heldout: Path, tiny_tokenizer: Path, make_mesh: Callable[..., Any]
) -> None:
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    model = tiny_llama()
    results = []
    for micro_batch_tokens in (SEQ_LEN, 1000):
        config = ValConfig.model_validate(
            {
                "interval": 1,
                "sets": [{"name": "tiny", "path": tiny_heldout}],
                "seq_lens": [SEQ_LEN],
                "micro_batch_tokens": micro_batch_tokens,
            }
        )
        validation = build_validation(
            config,
            tokenizer=tokenizer,
            vocab_size=384,
            mesh=make_mesh(),
            pin_memory=False,
            cache_dir=Path("unused"),
        )
        assert validation is not None
        results.append(validation.run(model))
    assert results[1] == pytest.approx(results[0], rel=1e-6)

    pool = TokenPool([tiny_heldout])
    ids = pool.read(0, pool.num_tokens)
    byte_counts = token_bytes(tokenizer, 384)
    nats, labels = [], []
    for document in np.split(ids, pool.document_ends(0, pool.num_tokens)):
        for start in range(0, len(document) - 1, SEQ_LEN):
            window = document[start : start + SEQ_LEN]
            if len(window) > 1:
                nats.append(window_nats(model, window[:-1], window[1:]))
                labels.append(window[1:])
    all_nats, num_bytes = np.concatenate(nats), byte_counts[np.concatenate(labels)]
    assert results[0]["val/tiny/loss@48"] == pytest.approx(all_nats.mean(), rel=1e-5)
    bpb = all_nats[num_bytes > 0].sum() / math.log(2) / num_bytes.sum()
    assert results[0]["val/tiny/bpb@48"] == pytest.approx(bpb, rel=1e-5)
