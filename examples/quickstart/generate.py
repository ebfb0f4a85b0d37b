"""Text from the newest checkpoint of a run, on the CPU.

    uv run python examples/quickstart/generate.py outputs/quickstart --prompt "def read_line(self"

Everything it needs lies in the run directory: the checkpoint holds the weights and says which model and tokenizer they
are of. It keeps no cache of keys and values, so it is for a look at small models and no more.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from configs.errors import ConfigError
from configs.sft import SFTConfig
from models.base import CausalLM
from models.batch import IGNORE_INDEX
from models.hf_config import config_from_dict
from models.registry import build_model
from trainer.checkpoint import Checkpointer, ModelRecord, find_checkpoint, read_state
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.errors import RunError
from trainer.parallel.mesh import one_rank_mesh
from trainer.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--prompt", default="def read_line(self")
    parser.add_argument("--step", type=int, help="step of the checkpoint; the newest one by default")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    config_file = arguments.run_dir / "configs" / "sft.json"
    if not config_file.is_file():
        parser.error(f"{arguments.run_dir} is not a run directory: it has no configs/sft.json")
    config = SFTConfig.model_validate_json(config_file.read_text())
    try:
        checkpoint = find_checkpoint(arguments.run_dir, arguments.step, print, repair=False)
        record = ModelRecord.of(read_state(checkpoint))
        if record.tokenizer is None:
            parser.error("the run has no tokenizer")
        tokenizer = load_tokenizer(record.tokenizer)
        model = load_model(record, checkpoint, config.data.seq_len)
    except (ConfigError, RunError) as error:
        raise SystemExit(str(error)) from error

    generator = torch.Generator().manual_seed(arguments.seed)
    prompt_ids: list[int] = tokenizer.encode(arguments.prompt, add_special_tokens=False)
    if not prompt_ids:
        parser.error("the prompt is empty")
    ids = generate(
        model,
        prompt_ids,
        max_new_tokens=arguments.max_new_tokens,
        window=config.data.seq_len,
        temperature=arguments.temperature,
        eos_token_id=tokenizer.get_vocab()[str(tokenizer.eos_token)],
        generator=generator,
    )
    print(f"--- {checkpoint}")
    print(tokenizer.decode(ids, skip_special_tokens=True))


def load_model(record: ModelRecord, checkpoint: Path, seq_len: int) -> CausalLM:
    """The run's model in fp32 with the weights of a checkpoint; the optimizer's state is not read."""
    model = build_model(config_from_dict(record.config), seq_len=seq_len, attn="sdpa", dtype=torch.float32)
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    mesh = one_rank_mesh(torch.device("cpu"))
    Checkpointer(checkpoint.parents[1], None, mesh).load(checkpoint, weights, ignore=("optimizer.",))
    return model


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    window: int,
    temperature: float,
    eos_token_id: int,
    generator: torch.Generator,
) -> list[int]:
    """The prompt and what follows, up to EOS or `max_new_tokens`; each token from the last `window` ones."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        logits = next_logits(model, ids[-window:])
        if temperature == 0:
            next_id = int(logits.argmax())
        else:
            next_id = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if next_id == eos_token_id:
            break
        ids.append(next_id)
    return ids


def next_logits(model: CausalLM, ids: list[int]) -> torch.Tensor:
    """(vocab_size,) logits of the token after `ids`."""
    rows = Rows.empty(1, len(ids))
    rows.input_ids[0] = ids
    rows.labels.fill(IGNORE_INDEX)
    rows.segment_lengths[0] = np.array([len(ids)], np.int64)
    return model.logits(collate(rows, full_rows=True, pin_memory=False))[0, -1]


if __name__ == "__main__":
    main()
