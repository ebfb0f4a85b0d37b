"""Context parallelism: several ranks compute one row, each a share of its positions.

To read in this order: `base` (what a model knows of it), `exchange` and `ulysses` (attention by heads); then attention
by keys: `ring_plan` (who meets whom), `ring_passes` (forward and backward of one rank), `ring` (both as one operator
over a process group). The passes are made of attentions over a part of the keys: `parts` (what they take and give, and
how they are joined), `partial_attention` (the two kinds of parts), `plain_attention` (matrix products) and
`fused_attention` (CUDA kernels).
"""
