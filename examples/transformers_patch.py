"""Run a gated-delta model of Hugging Face's transformers with our operators, and pack documents into one row.

pip install '.[hf]'
python examples/transformers_patch.py
"""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from fastweights.compat.transformers import patch

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=16,
    pad_token_id=0,
)
model = Qwen3NextForCausalLM(config).eval()
documents = [torch.randint(256, (1, length)) for length in (40, 3, 21)]
bounds = torch.tensor([0, 40, 43, 64], dtype=torch.int32)
packed = {
    "input_ids": torch.cat(documents, 1),
    "position_ids": torch.cat([torch.arange(x.shape[1]) for x in documents])[None],
    "cu_seq_lens_q": bounds,
    "cu_seq_lens_k": bounds,
    "use_cache": False,
}

with torch.no_grad(), patch("qwen3_next") as bound:
    print(bound)
    alone = torch.cat([model(document).logits for document in documents], 1)
    difference = (model(**packed).logits - alone).abs().max().item()
    print(f"largest difference between documents packed and alone: {difference:.1e}")
    print("8 more tokens:", model.generate(documents[0], max_new_tokens=8)[0, 40:].tolist())
