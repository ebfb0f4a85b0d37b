"""Memory of a validation round on a GPU, by the allocator's own count."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.sft import SFTConfig
from configs.validation import ValConfig
from trainer.run import Run, StopSignal
from trainer.tokenizer import load_tokenizer
from trainer.train import Trainer
from trainer.validation import build_validation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SEQ_LEN, VOCAB = 512, 32_000
ARCH = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def write_documents(folder: Path, count: int) -> Path:
    """Documents of SEQ_LEN tokens, each a row of its own; EOS is 0."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(2, 300, (count, SEQ_LEN)).astype("<u2")
    tokens[:, -1] = 0
    path = folder / "00000.ds"
    tokens.tofile(path)
    (SEQ_LEN * np.arange(1, count + 1)).astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"tiny|2\n{tokens.size}\n")
    return folder


def peak_of(call: Callable[[], object]) -> int:
    """Bytes at the peak of `call`, beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_ten_times_the_batches_need_no_more_memory(tmp_path, tiny_tokenizer, monkeypatch):
    """Field case R118: 10 and 100 forward passes peak alike, below a training step, and a step after them peaks as
    one before."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    values = {
        "model": {"arch": ARCH, "init": {}},
        "data": {"type": "fake", "seq_len": SEQ_LEN, "batch_size": 8, "micro_batch_size": 8, "num_rows": 1000},
        "max_steps": 6,
        "output_dir": str(tmp_path),
        "run": {"name": "run"},
    }
    config = SFTConfig.model_validate(values)
    (tmp_path / "run").mkdir()
    trainer = Trainer(config, Run(dir=tmp_path / "run", attempt=0, stop=StopSignal()))
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    peaks = []
    try:
        for count in (10, 10, 100):  # the first one warms up
            folder = write_documents(tmp_path / f"{len(peaks)}", 8 * count)
            table = {"interval": 1, "sets": [{"name": "set", "path": folder}], "seq_lens": [SEQ_LEN]}
            val_config = ValConfig.model_validate(table | {"micro_batch_tokens": 8 * SEQ_LEN})
            validation = build_validation(
                val_config,
                tokenizer=tokenizer,
                vocab_size=VOCAB,
                mesh=trainer.mesh,
                pin_memory=True,
                cache_dir=tmp_path,
            )
            assert validation is not None
            peaks.append(peak_of(lambda validation=validation: validation.run(trainer.model)))
        training = peak_of(trainer.run)
    finally:
        trainer.close()
    assert peaks[1] == peaks[2], peaks
    assert peaks[2] < training, (peaks, training)
