"""A real model, SmolLM2-135M-Instruct, against transformers: the same logits and the same greedy answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.base import CausalLM
from models.batch import Batch
from models.hf_config import read_config
from models.registry import build_model, check_vocabulary
from trainer.data.collate import collate
from trainer.data.row import Rows

TEXT = """The capital of France is Paris. In 1889 the Eiffel Tower was built there, 330 metres high.

def double(x):
    return 2 * x
"""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def pair(smollm2_folder: Path) -> tuple[CausalLM, Any, Any]:
    """Ours, transformers', the tokenizer; both models in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = read_config(smollm2_folder)
    with torch.device("meta"):
        ours = build_model(config, seq_len=128, attn="sdpa", dtype=torch.float32)
    weights = {name: weight.float() for name, weight in load_file(smollm2_folder / "model.safetensors").items()}
    ours.load_state_dict(weights, assign=True)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    check_vocabulary(config, tokenizer_length=len(tokenizer))
    return ours, theirs, tokenizer


def _batch(documents: list[list[int]]) -> Batch:
    """One row of packed documents."""
    ids = np.concatenate(documents)
    rows = Rows.empty(1, len(ids))
    rows.input_ids[0], rows.labels[0] = ids, np.roll(ids, -1)
    rows.segment_lengths = [np.array([len(document) for document in documents])]
    return collate(rows, full_rows=len(documents) == 1, pin_memory=False)


@torch.no_grad()
def test_logits_on_real_text_equal_transformers(pair) -> None:
    ours, theirs, tokenizer = pair
    assert ours.count_parameters().num_params == 134_515_008
    documents = [tokenizer(TEXT).input_ids, tokenizer("Once upon a time").input_ids]
    packed = ours.logits(_batch(documents))[0].split([len(document) for document in documents])
    for document, logits in zip(documents, packed, strict=True):
        expected = theirs(input_ids=torch.tensor([document])).logits[0]
        assert (logits - expected).abs().max() < 1e-4
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@torch.no_grad()
def test_the_greedy_answer_equals_transformers_and_is_right(pair) -> None:
    ours, theirs, tokenizer = pair
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()
    # Greedy tokens are equal exactly when each is the most likely one after those before it.
    logits = ours.logits(_batch([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == answer
    assert "The capital of France is Paris." in tokenizer.decode(answer)


def test_the_tokenizer_is_smollm2s(pair) -> None:
    """Numbers are cut into digits, and every text comes back."""
    tokenizer = pair[2]
    assert len(tokenizer) == 49_152
    assert tokenizer.tokenize("In 1889") == ["In", "Ġ", "1", "8", "8", "9"]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert tokenizer("<|im_start|>user").input_ids[0] == tokenizer.bos_token_id == 1
