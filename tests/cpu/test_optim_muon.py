"""Muon: the iteration against a plain one, the step against a plain float64 optimizer."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from moefold.comm.world import World
from moefold.config.slot import build
from moefold.layers.kinds.gqa import Gqa
from moefold.model.init import initialise
from moefold.optim import muon
from moefold.optim.adamw import AdamWOptimizer
from moefold.optim.base import LocalMatrices
from moefold.optim.config import AdamWRule, Muon
from moefold.optim.muon import (
    MuonOptimizer,
    choose_arithmetic,
    orthogonalise,
    update_scale,
)
from moefold.parallel.apply import build_parts as build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.proof.subjects import DENSE, decoder

SHAPES = {
    "embedding.weight": (40, 24),
    "layers.0.norm.weight": (24,),
    "layers.0.attention.qkv.weight": (40, 24),
    "layers.0.attention.out.weight": (24, 24),
    "layers.0.moe.router.weight": (5, 24),
    "layers.0.moe.experts.w_in": (5, 32, 24),
    "layers.0.moe.experts.w_out": (5, 24, 16),
    "layers.1.moe.experts.w_in": (5, 2, 16, 24),
    "layers.1.moe.experts.w_out": (5, 24, 16),
    "head.weight": (40, 24),
}
MATRICES = [n for n in SHAPES if "attention" in n or "experts" in n]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same in whatever order tests run."""
    torch.manual_seed(0)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Return the same drawn parameters on every call."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter((torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype))
        for name, shape in SHAPES.items()
    }


def give_gradients(params: Mapping[str, Tensor], step: int, times: float = 1.0) -> None:
    """Set each gradient to the draw that belongs to the step."""
    draw = torch.Generator().manual_seed(100 + step)
    for p in params.values():
        p.grad = (torch.randn(p.shape, generator=draw, dtype=torch.float64) * times).to(p.dtype)


def run(optimizer: MuonOptimizer, steps: range, scale: float = 1.0) -> None:
    """Take the steps, with a learning rate that changes."""
    for step in steps:
        give_gradients(optimizer.params, step, 1 / scale)
        optimizer.step(scale=scale, lr_factor=1 / (1 + step))


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether both hold the same tensors bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def orthogonalise_reference(matrix_mn: Tensor, steps: int) -> Tensor:
    """Return Newton-Schulz of one matrix after ``steps``, plainly, in the matrix's own type."""
    if matrix_mn.shape[0] > matrix_mn.shape[1]:
        return orthogonalise_reference(matrix_mn.mT, steps).mT
    x = matrix_mn / torch.linalg.vector_norm(matrix_mn).clamp(min=muon.EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = muon.LINEAR * x + (muon.CUBIC * gram + muon.QUINTIC * gram @ gram) @ x
    return x


def plain_muon(params: Mapping[str, nn.Parameter], rule: Muon, steps: range) -> None:
    """Take the same steps on the matrices alone: one by one, as the papers write them."""
    momenta = {name: torch.zeros_like(params[name]) for name in MATRICES}
    for step in steps:
        lr = rule.lr / (1 + step)
        give_gradients(params, step)
        for name in MATRICES:
            p, grad, buffer = params[name].data, params[name].grad, momenta[name]
            buffer.copy_(rule.momentum * buffer + (1 - rule.momentum) * grad)
            look = rule.momentum * buffer + (1 - rule.momentum) * grad if rule.nesterov else buffer
            stacks = (t.view(-1, *p.shape[-2:]) for t in (p, look))
            for weight, update in zip(*stacks, strict=True):
                rows, columns = weight.shape
                factor = {
                    "match_rms": 0.2 * math.sqrt(max(rows, columns)),
                    "shape": math.sqrt(max(1, rows / columns)),
                    "none": 1.0,
                }[rule.scale]
                direction = orthogonalise_reference(update, rule.ns_steps)
                weight *= 1 - lr * rule.weight_decay
                weight -= lr * factor * direction


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 8e-2)],
)
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16), (2, 40), (33, 17)])
def test_the_iteration_equals_the_plain_one(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """Wide, tall and square, batched, against one matrix at a time in float64."""
    x_Nmn = torch.randn(7, *shape, dtype=torch.float64)
    got = orthogonalise(x_Nmn if dtype == torch.float64 else x_Nmn.float(), 5, dtype).double()
    for x, y in zip(x_Nmn, got, strict=True):
        expected = orthogonalise_reference(x, 5)
        assert float((y - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_out_is_nearly_orthogonal(dtype: torch.dtype) -> None:
    """Same singular vectors, singular values near 1, whatever they were before."""
    left, right = torch.linalg.qr(torch.randn(2, 64, 48))[0]
    for values in (torch.ones(48), torch.logspace(0, -2, 48)):
        for shape in ("tall", "wide"):
            x = (left * values) @ right.mT[:, :64]
            x, polar = (x, left @ right.mT) if shape == "tall" else (x.mT, right @ left.mT)
            y = orthogonalise(x[None] * 1e-4, 5, dtype)[0].float()
            found = torch.linalg.svdvals(y)[:48]
            assert float(found.min()) > 0.6 and float(found.max()) < 1.25
            assert float((y * polar).sum() / y.norm() / polar.norm()) > 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 192), (48, 32), (33, 65)])
def test_batched_equals_one_by_one_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A matrix's update does not depend on its company, so not on how experts are spread.

    In bfloat16 from the side on at which it is chosen.
    """
    assert min(shape) >= muon.BFLOAT16_SIDE
    x_Nmn = torch.randn(9, *shape)
    one_by_one = torch.cat([orthogonalise(x[None], 5, dtype) for x in x_Nmn])
    assert torch.equal(orthogonalise(x_Nmn, 5, dtype), one_by_one)


def test_size_of_the_matrix_does_not_matter_and_zero_stays_zero() -> None:
    """The update is the direction alone; powers of two change no bit."""
    x_Nmn = torch.randn(3, 8, 12)
    assert torch.equal(
        orthogonalise(x_Nmn * 2**-10, 5, torch.float32), orthogonalise(x_Nmn, 5, torch.float32)
    )
    x_Nmn[1] = 0
    for dtype in (torch.float32, torch.bfloat16):
        y = orthogonalise(x_Nmn, 5, dtype)
        assert torch.equal(y[1], torch.zeros(8, 12, dtype=dtype))
        assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("scale", ["match_rms", "shape", "none"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_equal_a_plain_optimizer(scale: str, nesterov: bool) -> None:
    """Six float64 steps: momentum, scale, decay, and the batching of all of it."""
    rule = Muon(lr=0.02, scale=scale, nesterov=nesterov, weight_decay=0.3)
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    run(MuonOptimizer(rule, ours), range(6))
    plain_muon(theirs, rule, range(6))
    for name in MATRICES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("shape", "original"), ("match_rms", "match_rms_adamw")]
)
def test_steps_equal_torch_muon(ours: str, theirs: str) -> None:
    """torch has it for single matrices, in bfloat16: movements agree to that type's precision."""
    rule = Muon(lr=0.02, scale=ours, weight_decay=0.1, arithmetic="float32")
    names = ["layers.0.attention.qkv.weight", "layers.0.attention.out.weight"]
    mine = {n: p for n, p in parameters().items() if n in names}
    other = {n: p for n, p in parameters().items() if n in names}
    optimizer = torch.optim.Muon(other.values(), lr=0.02, weight_decay=0.1, adjust_lr_fn=theirs)
    own = MuonOptimizer(rule, mine)
    for step in range(5):
        give_gradients(mine, step)
        give_gradients(other, step)
        own.step()
        optimizer.step()
    start = parameters()
    for name in names:
        moved = (mine[name] - start[name]).detach()
        expected = (other[name] - start[name]).detach()
        assert float((moved - expected).norm() / expected.norm()) < 0.03


def test_match_rms_moves_elements_as_adamw_does() -> None:
    """0.2 times the rate, root mean square, for every shape of matrix."""
    for shape in ((64, 32), (32, 64), (48, 48)):
        y = orthogonalise(torch.randn(4, *shape), 5, torch.float32)
        size = float(y.square().mean().sqrt()) * update_scale("match_rms", *shape)
        assert 0.15 < size < 0.22


@pytest.mark.parametrize("side", [36, 12])
def test_batches_change_no_bit(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix per batch, three, or all: the same weights, in either type that is chosen."""
    shapes = {"u": (40, side), "v": (5, 40, side), "w": (7, 2, 40, side)}
    results, counts = [], []
    for matrices in (1, 3, 1000):
        monkeypatch.setitem(muon.BATCH_BYTES, "cpu", matrices * 2 * 40 * side)
        params = {n: nn.Parameter(torch.zeros(shape)) for n, shape in shapes.items()}
        run(MuonOptimizer(Muon(), params), range(3))
        results.append(params)
        counts.append(len(list(muon.batches(params.values()))))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    assert counts == [20, 8, 1]


def test_the_rest_is_adamw_alone() -> None:
    """Embedding, head, router and norms move exactly as under AdamW with the rest's settings."""
    rest = AdamWRule(lr=0.006, weight_decay=0.05)
    ours = parameters()
    optimizer = MuonOptimizer(Muon(rest=rest), ours)
    run(optimizer, range(4), scale=0.3)
    others = {n: p for n, p in parameters().items() if n not in MATRICES}
    alone = AdamWOptimizer(rest, others)
    for step in range(4):
        everything = parameters()
        give_gradients(everything, step, 1 / 0.3)
        for name, p in others.items():
            p.grad = everything[name].grad
        alone.step(scale=0.3, lr_factor=1 / (1 + step))
    assert equal({n: ours[n] for n in others}, others)
    names = {name.removeprefix("optim.") for name in optimizer.state()}
    kept = {f"{n}.momentum" for n in MATRICES}
    kept |= {f"{n}.{what}" for n in others for what in ("exp_avg", "exp_avg_sq", "step")}
    assert names == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_is_a_factor_on_the_gradient(dtype: torch.dtype) -> None:
    """A power of two changes no bit, in weights or momenta."""
    plain, scaled = parameters(dtype), parameters(dtype)
    first, second = MuonOptimizer(Muon(), plain), MuonOptimizer(Muon(), scaled)
    run(first, range(3))
    run(second, range(3), scale=1 / 16)
    assert equal(plain, scaled)
    assert equal(first.state(), second.state())


def test_matrices_that_were_made_anew_come_back_as_those_changed_in_place() -> None:
    """An optimizer from outside may do either, on one rank as on several."""
    wholes = LocalMatrices({"w": (2, 3)})
    for doubled in (lambda matrix: matrix * 2, lambda matrix: matrix.mul_(2)):
        pieces = {"w": torch.ones(2, 3)}
        matrices = [doubled(matrix) for matrix in wholes.gather(pieces)]
        assert torch.equal(wholes.scatter(matrices, pieces)["w"], torch.full((2, 3), 2.0))


def test_an_expert_without_tokens_keeps_its_momentum_and_decays() -> None:
    """A zero gradient from the start moves nothing but by decay; the others do not notice."""
    name = "layers.0.moe.experts.w_in"
    rule = Muon(lr=0.1, weight_decay=0.5)
    full, idle = parameters(), parameters()
    first, second = MuonOptimizer(rule, full), MuonOptimizer(rule, idle)
    for step in range(2):
        give_gradients(full, step)
        give_gradients(idle, step)
        idle[name].grad[3] = 0
        first.step()
        second.step()
    torch.testing.assert_close(idle[name][3], parameters()[name][3] * 0.95**2, rtol=1e-6, atol=0)
    rest = [0, 1, 2, 4]
    assert torch.equal(idle[name][rest], full[name][rest])
    assert bool(torch.isfinite(idle[name]).all())


def test_rate_zero_changes_no_weight() -> None:
    """In every group."""
    params = parameters()
    give_gradients(params, 0)
    MuonOptimizer(Muon(), params).step(lr_factor=0.0)
    assert equal(params, parameters())


def test_state_goes_out_and_comes_back_exactly() -> None:
    """Six steps at once are three, saved and loaded, and three more."""
    whole, broken = parameters(), parameters()
    unbroken = build(Muon(), whole)
    run(unbroken, range(6), scale=0.7)
    first = build(Muon(), broken)
    run(first, range(3), scale=0.7)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in broken.items()}
    second = build(Muon(), resumed)
    assert second.state().keys() == saved.keys()
    for name, tensor in second.state().items():
        tensor.copy_(saved[name])
    run(second, range(3, 6), scale=0.7)
    assert equal(whole, resumed)
    assert equal(unbroken.state(), second.state())


def test_two_runs_are_equal_bit_for_bit() -> None:
    """Nothing is measured or drawn to choose a path."""
    one, other = parameters(), parameters()
    run(MuonOptimizer(Muon(), one), range(3), scale=0.9)
    run(MuonOptimizer(Muon(), other), range(3), scale=0.9)
    assert equal(one, other)


def test_frozen_parameters_have_no_state_and_stay() -> None:
    """A matrix and a router."""
    params = parameters()
    frozen = ["layers.0.moe.experts.w_in", "layers.0.moe.router.weight"]
    for name in frozen:
        params[name].requires_grad_(False)
    optimizer = MuonOptimizer(Muon(), params)
    assert not any(name in key for key in optimizer.state() for name in frozen)
    run(optimizer, range(2))
    for name in frozen:
        assert torch.equal(params[name], parameters()[name])


def test_updates_are_in_place_and_announced() -> None:
    """Same memory, higher version, for every parameter and every state tensor."""
    params = parameters()
    optimizer = MuonOptimizer(Muon(), params)
    tensors = {**params, **optimizer.state()}
    before = {n: (t.data_ptr(), t._version) for n, t in tensors.items()}
    give_gradients(params, 0)
    optimizer.step()
    for name, tensor in tensors.items():
        where, version = before[name]
        assert tensor.data_ptr() == where
        assert tensor._version > version, name


def test_a_missing_gradient_is_refused_before_anything_changes() -> None:
    """In either group."""
    params = parameters()
    optimizer = MuonOptimizer(Muon(), params)
    give_gradients(params, 0)
    params["head.weight"].grad = None
    with pytest.raises(ValueError, match=r"head\.weight"):
        optimizer.step()
    assert equal(params, parameters())


def test_other_types_and_layouts_of_parameters() -> None:
    """bfloat16 weights take the float32 update, rounded; a turned matrix takes the same step."""
    name = "layers.0.attention.out.weight"
    start = parameters()[name].detach()
    rule = Muon(lr=0.1, arithmetic="float32", weight_decay=0.0)
    ways = {
        "plain": nn.Parameter(start.clone()),
        "turned": nn.Parameter(start.t().contiguous().t()),
        "half": nn.Parameter(start.bfloat16()),
    }
    grad = torch.randn(24, 24).bfloat16()
    for p in ways.values():
        p.grad = grad.to(p.dtype)
        optimizer = MuonOptimizer(rule, {name: p})
        optimizer.step()
        assert optimizer.state()[f"optim.{name}.momentum"].dtype == torch.float32
    torch.testing.assert_close(ways["turned"], ways["plain"], rtol=1e-6, atol=1e-6)
    expected = (start.bfloat16().float() + (ways["plain"] - start)).bfloat16()
    torch.testing.assert_close(ways["half"], expected, rtol=2**-7, atol=1e-6)


def test_a_gradient_of_another_memory_layout_is_read_rightly() -> None:
    """A stack whose gradient lies transposed in memory moves as if it did not."""
    one, other = (nn.Parameter(torch.ones(3, 2, 8, 12)) for _ in range(2))
    one.grad = torch.randn(2, 3, 12, 8).permute(1, 0, 3, 2)
    other.grad = one.grad.contiguous()
    for p in (one, other):
        MuonOptimizer(Muon(), {"w": p}).step(scale=0.5)
    assert not torch.equal(one, torch.ones(3, 2, 8, 12))
    assert torch.equal(one, other)


def test_arithmetic_is_chosen_by_rule() -> None:
    """float64 weights always take float64: layouts are proved equal in it."""
    single, double = torch.zeros(3, 40, 33), torch.zeros(40, 33, dtype=torch.float64)
    for setting in ("auto", "bfloat16", "float32"):
        assert choose_arithmetic(setting, double) == torch.float64
    assert choose_arithmetic("bfloat16", single) == torch.bfloat16
    assert choose_arithmetic("float32", single) == torch.float32
    native = muon.supports_bfloat16(torch.device("cpu"))
    assert choose_arithmetic("auto", single) == (torch.bfloat16 if native else torch.float32)
    assert choose_arithmetic("auto", single[:, :31]) == torch.float32


def test_what_is_shown() -> None:
    """Rates of both groups, and the live paths."""
    rule = Muon(lr=0.2, rest=AdamWRule(lr=0.1), arithmetic="float32")
    optimizer = MuonOptimizer(rule, parameters())
    assert optimizer.lr(0.5) == {"muon": 0.1, "adamw": 0.05}
    assert optimizer.describe() == {
        "muon": "6 parameters, Newton-Schulz of local matrices in float32",
        "adamw": "4 tensors fused",
    }
    names = [name for name in SHAPES if len(SHAPES[name]) == 1]
    vectors = {name: tensor for name, tensor in parameters().items() if name in names}
    assert names and MuonOptimizer(rule, vectors).describe()["muon"] == "0 parameters"


def test_heads_are_matrices_of_their_own() -> None:
    """The update is that of each head's rows alone; what has no heads is as without."""
    described = decoder(Gqa(heads=4, kv_heads=2, head_dim=4), DENSE)
    found, grads = [], dict[str, Tensor]()
    for by_heads in (False, True):
        data = ShardedState(build_parts(described, "fp64", Layout(), World.single()))
        initialise(data.parts.model, described, 1)
        rule = Muon(by_heads=by_heads, weight_decay=0.0, lr=1.0, nesterov=False)
        optimizer = data.optimizer(rule)
        before = {name: p.detach().clone() for name, p in data.params.items()}
        for name, parameter in data.params.items():
            generator = torch.Generator().manual_seed(len(name))
            grads[name] = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = grads[name].clone()
        optimizer.step()
        found.append({name: (before[name] - p).detach() for name, p in data.params.items()})
    plain, apart = found
    heads = {"q.weight": 4, "k.weight": 2, "v.weight": 2}
    for name, update in apart.items():
        count = heads.get(name.removeprefix("layers.0.attention."), 0)
        if not count:
            assert torch.equal(update, plain[name])
            continue
        stack_Nmn = grads[name].unflatten(0, (count, -1)) * (1 - rule.momentum)
        wanted = orthogonalise(stack_Nmn, rule.ns_steps, torch.float64)
        wanted = wanted * update_scale(rule.scale, *stack_Nmn.shape[1:])
        assert torch.allclose(update, wanted.flatten(0, 1))
        assert not torch.allclose(update, plain[name])
