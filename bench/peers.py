"""Training steps of other stacks on one device, for the models of ``one_device.py``.

Each takes a folder as Hugging Face has it, of a Qwen3-MoE, and the ids [B, S] of a batch, and gives
a step on those weights: forward, backward, clipping and AdamW. A stack that is not installed, or
cannot run on this device, raises what it says itself.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
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
    """Return torchtitan's, with its loss in chunks; attention is its own SDPA, as flex attention
    has no backward on CPUs, and experts compute in bfloat16 in every format.
    """
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
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
    weights = qwen3.Qwen3StateDictAdapter(config, None).from_hf(_tensors(folder))
    model.load_state_dict(weights, strict=False)
    del weights
    model.to(dtype).train()
    positions_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)

    model._skip_lm_head = True
    chunked = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab))
    loss = chunked.build()
    loss.set_lm_head(model.lm_head)
    labels_BS = F.pad(ids_BS[:, 1:], (0, 1), value=-100)
    valid = (labels_BS >= 0).sum().float()
    return _step(model, lambda: loss(model(ids_BS, positions_BS), labels_BS, valid)[0])


def megatron_core(folder: Path, ids_BS: Tensor, dtype: torch.dtype) -> Step:
    """Return Megatron Core's, with the layers of its ``local`` specification, its all-gather
    dispatcher and experts one after another; where it asks for the present GPU it is given the CPU.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine the router reads a name that nothing has set.
    vars(moe_utils).setdefault("te_general_gemm", None)
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    given = AutoConfig.from_pretrained(folder)
    config = TransformerConfig(
        num_layers=given.num_hidden_layers,
        hidden_size=given.hidden_size,
        num_attention_heads=given.num_attention_heads,
        num_query_groups=given.num_key_value_heads,
        kv_channels=given.head_dim,
        ffn_hidden_size=given.moe_intermediate_size,
        moe_ffn_hidden_size=given.moe_intermediate_size,
        num_moe_experts=given.num_experts,
        moe_router_topk=given.num_experts_per_tok,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        layernorm_epsilon=given.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
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
        rotary_base=1_000_000,
        share_embeddings_and_output_weights=False,
    )
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in _of_megatron(_tensors(folder), given.num_key_value_heads):
            own.pop(name).copy_(value)
    assert not own, own.keys()
    model.to(dtype).train()
    batch, seq = ids_BS.shape
    places_BS = torch.arange(seq).expand(batch, seq)
    hidden_11SS = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    labels_BS = ids_BS.roll(-1, 1)

    def loss() -> Tensor:
        return model(ids_BS, places_BS, hidden_11SS, labels=labels_BS)[:, :-1].mean()

    return _step(model, loss)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def _of_megatron(found: dict[str, Tensor], groups: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors as Megatron Core has them: joined, and by query group."""
    yield "embedding.word_embeddings.weight", found["model.embed_tokens.weight"]
    yield "decoder.final_layernorm.weight", found["model.norm.weight"]
    yield "output_layer.weight", found["lm_head.weight"]
    for name, value in found.items():
        if not name.startswith("model.layers."):
            continue
        number, half, *rest = name.removeprefix("model.layers.").removesuffix(".weight").split(".")
        layer = f"decoder.layers.{number}"
        match (half, *rest):
            case ("input_layernorm",):
                yield f"{layer}.input_layernorm.weight", value
            case ("post_attention_layernorm",):
                yield f"{layer}.pre_mlp_layernorm.weight", value
            case ("self_attn", "q_proj"):
                q, k, v = (found[name.replace("q_proj", f"{one}_proj")] for one in "qkv")
                width = k.shape[0] // groups
                parts = (one.view(groups, -1, width, one.shape[1]) for one in (q, k, v))
                joined = torch.cat([*parts], 1).flatten(0, 2)
                yield f"{layer}.self_attention.linear_qkv.weight", joined
            case ("self_attn", "o_proj"):
                yield f"{layer}.self_attention.linear_proj.weight", value
            case ("self_attn", ("q_norm" | "k_norm") as norm):
                yield f"{layer}.self_attention.{norm[0]}_layernorm.weight", value
            case ("mlp", "gate"):
                yield f"{layer}.mlp.router.weight", value
            case ("mlp", "experts", expert, "gate_proj"):
                both = torch.cat([value, found[name.replace("gate_proj", "up_proj")]])
                yield f"{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight", both
            case ("mlp", "experts", expert, "down_proj"):
                yield f"{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight", value
            case _:
                pass


PEERS: dict[str, Peer] = {
    "transformers eager": transformers("eager"),
    "transformers grouped_mm": transformers("grouped_mm"),
    "transformers eager, compiled": transformers("eager", compiled=True),
    "transformers grouped_mm, compiled": transformers("grouped_mm", compiled=True),
    "torchtitan": torchtitan,
    "megatron-core": megatron_core,
}
