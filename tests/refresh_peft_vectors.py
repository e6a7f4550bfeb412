"""Write tests/data/peft: adapters that PEFT made and saved, and the logits that it gives with them.

Needs ``peft`` and ``transformers``, which tests do without::

    python -m tests.refresh_peft_vectors
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.cpu.families import reference, stored_value, wide, written

FOLDER = Path(__file__).parent / "data" / "peft"
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 6,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "max_position_embeddings": 64,
    "attn_implementation": "eager", "experts_implementation": "eager",
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "whole": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["q_b_proj", "kv_b_proj", "o_proj", "lm_head"],
        "target_parameters": [
            "mlp.experts.down_proj",
            "mlp.experts.gate_up_proj",
            "mlp.gate.weight",
            *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
            *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
        ],
        "rank_pattern": {"mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 2},
    },
    "down": {
        "r": 2,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": ["mlp.experts.down_proj"],
    },
}


def main() -> None:
    """Make the base, let PEFT adapt it, and write what it saves."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    ids = torch.arange(24).view(2, 12)
    for name, said in ADAPTERS.items():
        model = reference("deepseek_v3", SIZES).double().eval()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                tensor.copy_(stored_value(key, tuple(tensor.shape)))
        (FOLDER / "config.json").write_text(json.dumps(written(model), indent=1) + "\n")
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **said)).eval()
        draws = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_" in key:
                    drawn = torch.randn(parameter.shape, generator=draws) * 0.3
                    parameter.copy_(drawn.to(torch.bfloat16))
            with wide(model):
                logits = adapted(ids).logits
        adapted.float().save_pretrained(str(FOLDER / name))
        held = load_file(FOLDER / name / "adapter_model.safetensors")
        held = {key: value for key, value in held.items() if "lora_" in key}
        save_file(held, FOLDER / name / "adapter_model.safetensors", {"format": "pt"})
        config = FOLDER / name / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()), indent=1) + "\n")
        (FOLDER / name / "README.md").unlink()
        save_file({"logits": logits.contiguous()}, FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
