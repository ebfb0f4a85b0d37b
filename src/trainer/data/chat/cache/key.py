"""What a cache of tokenised conversations is found by: all that changes ids or masks, and nothing else."""

import json
import re
from hashlib import blake2b

from trainer.data.chat.cache.tokenise import Tokeniser
from trainer.data.chat.read.parts import Part

FORMAT = 1
"""Goes up with every change of what the files hold, or of how rows become tokens."""

_NAME_CHARS = 60


def cache_name(part: Part, tokeniser: Tokeniser) -> str:
    """Name of the folder that holds the tokens of a part."""
    rules = tokeniser.work.rules
    content = {
        "format": FORMAT,
        "part": part.key,
        "encoder": tokeniser.encoder.key,
        "renderer": tokeniser.renderer.key,
        "roles": sorted(rules.roles),
        "last_turn_only": rules.last_turn_only,
    }
    digest = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", part.name)[-_NAME_CHARS:].strip("._") or "chats"
    return f"{name}-{digest}"
