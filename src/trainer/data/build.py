"""From `[data]` to its source of rows."""

from pathlib import Path

from configs.data import DataConfig, FakeDataConfig, NoDataConfig, SFTDataConfig, TokensDataConfig
from configs.errors import ConfigError
from trainer.data.chat.build import ChatTools, build_chats
from trainer.data.fake import FakeSource
from trainer.data.row import RowSource
from trainer.data.shards import TokenPool
from trainer.data.tokens import TokensSource


def build_source(
    config: DataConfig,
    *,
    vocab_size: int,
    eos_token_id: int | None,
    tokenizer_name: str | None,
    chats: ChatTools | None = None,
) -> RowSource:
    """The rows that a config asks for.

    Args:
        vocab_size: embeddings of the model; no row holds an id from here on.
        eos_token_id: the tokenizer's end of text, which token shards are held against.
        tokenizer_name: None when the run has no tokenizer; shards are then taken as they are.
        chats: what turns conversations into tokens; None when the run has no tokenizer.

    Raises:
        ConfigError: the data is missing, damaged, too small, or another tokenizer's.
    """
    match config:
        case SFTDataConfig():
            if chats is None:
                raise ConfigError.one("tokenizer.name", "data of type sft needs a tokenizer with a chat template")
            return build_chats(config, chats, vocab_size=vocab_size)
        case TokensDataConfig():
            return _build_tokens(config, vocab_size, eos_token_id, tokenizer_name)
        case FakeDataConfig():
            return FakeSource(
                seq_len=config.seq_len,
                vocab_size=vocab_size,
                seed=config.seed,
                num_rows=config.num_rows,
                length=config.length,
                input_ids=config.input_ids,
            )
        case NoDataConfig():
            raise ConfigError.one("data", 'is missing, or of type "none": there are no rows to read')


def _build_tokens(
    config: TokensDataConfig, vocab_size: int, eos_token_id: int | None, tokenizer_name: str | None
) -> TokensSource:
    pool = TokenPool(config.paths)
    if tokenizer_name is not None:
        if eos_token_id is None:
            raise ConfigError.one(
                "tokenizer.name",
                f"{tokenizer_name} has no end-of-text token, so the shards of data.paths cannot be held against it",
            )
        pool.check_tokenizer(eos_token_id, tokenizer_name)
    # A folder is known by its last part, so that a run can go on after it was moved.
    name = Path(tokenizer_name).name if tokenizer_name is not None and Path(tokenizer_name).is_dir() else tokenizer_name
    return TokensSource(
        pool,
        seq_len=config.seq_len,
        vocab_size=vocab_size,
        seed=config.seed,
        shuffle=config.shuffle,
        document_masking=config.document_masking,
        tokenizer={"name": name, "eos_token_id": eos_token_id},
    )
