"""Training steps of other stacks on one device, for the models of ``one_device.py``.

Each takes a folder as Hugging Face has it, of a Qwen3-MoE, and the ids [B, S] of a batch, and gives
a step on those weights: forward, backward, clipping and AdamW. A stack that is not installed, or
cannot run on this device, raises what it says itself.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3MoeForCausalLM

LR, CLIP = 1e-4, 1.0
Step = Callable[[], float]
"""Makes one optimizer step and returns its loss."""
Peer = Callable[[Path, Tensor, torch.dtype], Step]


def _step(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step() -> float:
        found = loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(found.detach())

    return step


def transformers(experts: str, compiled: bool = False) -> Peer:
    """Return transformers' with one form of its experts, compiled as a whole or not."""

    def made(folder: Path, ids_BS: Tensor, dtype: torch.dtype) -> Step:
        model = Qwen3MoeForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation=experts
        )
        model.train()
        run: Any = torch.compile(model) if compiled else model
        return _step(model, lambda: run(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss)

    return made


def torchtitan(folder: Path, ids_BS: Tensor, dtype: torch.dtype) -> Step:
    """Return torchtitan's: attention is its own SDPA, as flex attention has no backward on CPUs."""
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    given = AutoConfig.from_pretrained(folder)
    dim, vocab, head_dim = given.hidden_size, given.vocab_size, given.head_dim
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=given.num_hidden_layers,
        dim=dim,
        n_heads=given.num_attention_heads,
        n_kv_heads=given.num_key_value_heads,
        head_dim=head_dim,
        moe_hidden_dim=given.moe_intermediate_size,
        num_experts=given.num_experts,
        top_k=given.num_experts_per_tok,
        fuse_qkv=False,
        attn_backend="varlen",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=head_dim, max_seq_len=4096, theta=1e6),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe.load_balance_coeff = None
    config = qwen3.Qwen3Model.Config(
        vocab_size=vocab,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=qwen3.Linear.Config(
            in_features=dim, out_features=vocab, param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    weights = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    model.load_state_dict(qwen3.Qwen3StateDictAdapter(config, None).from_hf(weights), strict=False)
    model.to(dtype).train()
    positions_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)

    def loss() -> Tensor:
        logits_BSV = model(ids_BS, positions_BS)
        return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())

    return _step(model, loss)


def megatron_core(folder: Path, ids_BS: Tensor, dtype: torch.dtype) -> Step:
    """Return Megatron Core's, on weights of its own, with layers that need no other package."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    given = AutoConfig.from_pretrained(folder)
    if not torch.distributed.is_initialized():
        file = tempfile.mkstemp()[1]
        Path(file).unlink()
        torch.distributed.init_process_group("gloo", f"file://{file}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=given.num_hidden_layers,
        hidden_size=given.hidden_size,
        num_attention_heads=given.num_attention_heads,
        num_query_groups=given.num_key_value_heads,
        kv_channels=given.head_dim,
        num_moe_experts=given.num_experts,
        moe_router_topk=given.num_experts_per_tok,
        moe_ffn_hidden_size=given.moe_intermediate_size,
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec(
        given.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=given.vocab_size,
        max_sequence_length=ids_BS.shape[1],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model.to(dtype).train()
    batch, seq = ids_BS.shape
    places_BS = torch.arange(seq).expand(batch, seq)
    hidden_11SS = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    labels_BS = ids_BS.roll(-1, 1)
    return _step(model, lambda: model(ids_BS, places_BS, hidden_11SS, labels=labels_BS).mean())


PEERS: dict[str, Peer] = {
    "transformers eager": transformers("eager"),
    "transformers grouped_mm": transformers("grouped_mm"),
    "transformers eager, compiled": transformers("eager", compiled=True),
    "transformers grouped_mm, compiled": transformers("grouped_mm", compiled=True),
    "torchtitan": torchtitan,
    "megatron-core": megatron_core,
}
