"""Losses beside cross-entropy: gradients by closed forms, pairs as data, runs that learn."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefold import api
from moefold.config.errors import RunError
from moefold.config.load import load
from moefold.config.slot import build
from moefold.data.batch import MicroBatch, pack
from moefold.data.config import Data, DataError
from moefold.data.loader import Loader
from moefold.data.prepare import prepare
from moefold.layers.kinds.dense import Dense
from moefold.layers.linear import Adaptable
from moefold.model.decoder import DecoderModel
from moefold.parallel.apply import single_rank_parts
from moefold.parallel.data.sharding import ShardedState
from moefold.run import Run
from moefold.spec.tuning import adapt
from moefold.training.config import Lora
from moefold.training.fork import fork
from moefold.training.losses.config import Distill, Dpo
from moefold.training.step import gradients
from moefold.training.trainer import Trainer
from tests.chats import write_chat_folder
from tests.cpu.runs import raw_run
from tests.cpu.small import GQA, decoder, ids_of, model_of, moe, relative

LORA = Lora(rank=2, targets=("all", "head"))
LENGTHS = (5, 7, 4, 4)
PAIRS = ("chosen", "rejected")


def rows() -> tuple[list[Tensor], MicroBatch]:
    """Two pairs, of which the first tokens are no labels; and the same as rows, padded."""
    texts = [ids_of(length, seed=7 + at) for at, length in enumerate(LENGTHS)]
    made = pack([text.tolist() for text in texts], pad_to=24)
    starts = [sum(LENGTHS[:at]) for at in range(len(LENGTHS))]
    made.labels_T[starts] = -100
    return texts, replace(made, n_labels=made.n_labels - len(starts))


def adapted() -> DecoderModel:
    """A model whose adapters do something."""
    model = model_of(adapt(decoder(GQA, Dense(width=24), moe(balance=())), LORA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_lora_b"):
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def logits_of(model: DecoderModel, text: Tensor) -> Tensor:
    """The logits before each label, as autograd makes them."""
    return model.logits(text[None])[0, 1:-1]


def log_of(model: DecoderModel, text: Tensor) -> Tensor:
    return logits_of(model, text).log_softmax(1).gather(1, text[2:, None]).sum()


def without_adapters(model: DecoderModel, text: Tensor) -> Tensor:
    """The log-probability of a text by the weights alone, whatever the package calls off."""
    held = {one: one.adapters for one in model.modules() if isinstance(one, Adaptable)}
    for one in held:
        one.adapters = {}
    found = log_of(model, text).detach()
    for one, adapters in held.items():
        one.adapters = adapters
    return found


def grads_of(model: DecoderModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", ["sigmoid", "ipo"])
def test_gradients_of_pairs_are_those_of_the_closed_form(form: Any) -> None:
    """Sums over labels; against the model without its adapters."""
    model, (texts, batch), beta = adapted(), rows(), 0.7
    gains = [log_of(model, text) - without_adapters(model, text) for text in texts]
    h = torch.stack([gains[0] - gains[1], gains[2] - gains[3]])
    each = -F.logsigmoid(beta * h) if form == "sigmoid" else (h - 1 / (2 * beta)).square()
    each.mean().backward()
    wanted = grads_of(model)
    assert wanted and all(name.endswith(("_lora_a", "_lora_b")) for name in wanted)
    loss = build(Dpo(form=form, beta=beta))
    found = gradients(ShardedState(single_rank_parts(model)), [batch], 16, objective=loss)
    for name, grad in grads_of(model).items():
        assert relative(grad, wanted[name]) <= 1e-10, name
    margin, accuracy = (beta * h).mean(), (h > 0).double().mean()
    told = torch.tensor([found.lm_loss, *found.extra_figures.values()])
    torch.testing.assert_close(told, torch.stack([each.mean(), margin, accuracy]).detach().float())


@pytest.mark.parametrize(("t", "k"), [(1.0, 0), (2.5, 0), (2.5, 5), (1.0, 64)])
def test_gradients_of_a_divergence_are_those_of_the_closed_form(t: float, k: int) -> None:
    """The teacher is another model, of other layers and width; of k tokens and of all others."""
    model, (texts, batch) = adapted(), rows()
    wider = decoder(GQA, moe(balance=()), moe(balance=())).model_copy(update={"hidden": 24})
    teacher = model_of(wider, seed=5)
    total, labels = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        p = (logits_of(teacher, text).detach() / t).log_softmax(1)
        q = (logits_of(model, text) / t).log_softmax(1)
        if k:
            ids, rest = p.topk(k, 1).indices, torch.ones_like(p).bool()
            rest.scatter_(1, ids, False)
            events = [
                (one.gather(1, ids), (one.exp() * rest).sum(1, keepdim=True)) for one in (p, q)
            ]
            p, q = (torch.cat([log, m.log() if k < 64 else m], 1) for log, m in events)
        total, labels = total + t**2 * (p.exp() * (p - q)).sum(), labels + len(q)
    wanted_loss = total / labels
    wanted_loss.backward()
    wanted = grads_of(model)
    loss = build(Distill(teacher="", temperature=t, stored="" if k else None, top_k=k or 1))
    loss.teacher = single_rank_parts(teacher)
    found = gradients(ShardedState(single_rank_parts(model)), [batch], 16, objective=loss)
    assert abs(found.lm_loss - wanted_loss.item()) <= 1e-10
    for name, grad in grads_of(model).items():
        assert relative(grad, wanted[name]) <= 1e-10, name


def test_a_pair_stands_in_a_sequence_one_answer_after_the_other(tmp_path: Path) -> None:
    loader = Loader(prepared(tmp_path, examples(6)), 64, 2, 2)
    for batch in loader.all_batches():
        assert len(batch.lengths) % 2 == 0 and batch.lengths
        origins = [(s.document, s.start > 0) for s in batch.sources]
        assert origins[::2] == [(d, False) for d, _ in origins[1::2]]
        assert all(rejected for _, rejected in origins[1::2])
        start = 0
        for at, length in enumerate(batch.lengths):
            labels = batch.labels_T[start : start + length]
            text = loader.prepared.tokenizer.decode(labels[labels >= 0].tolist())
            assert text.startswith(("good", "bad")[at % 2]), text
            start += length


def test_scores_are_stored_once_and_read_by_each_step(tmp_path: Path) -> None:
    """With all tokens kept they say what the teacher does; others than asked for are refused."""
    write_chat_folder(tmp_path / "model")
    file, store = tmp_path / "chats.jsonl", tmp_path / "scores"
    turns = [[{"role": r, "content": f"{r} {n}"} for r in ("user", "assistant")] for n in range(9)]
    file.write_text("\n".join(json.dumps({"messages": one}) for one in turns))
    raw = raw_run(tmp_path, train={"steps": 3}) | {
        "data": {
            "seq": 64,
            "tokenizer": {"kind": "file", "path": str(tmp_path / "model")},
            "train": [{"source": "chat", "files": [str(file)], "holdout": 0.2}],
        }
    }
    with Trainer(load(Run, raw).record, tmp_path / "base") as job:
        vocab = job.run.decoder.vocab
        job.save()
    api.export(tmp_path / "base", hub := tmp_path / "hub")
    loss = {"kind": "distill", "teacher": str(hub), "temperature": 2.0}
    stored = loss | {"stored": str(store), "top_k": vocab}

    def trained(name: str, loss: dict[str, Any]) -> dict[str, float]:
        record = load(Run, raw | {"seed": 2, "train": raw["train"] | {"loss": loss}}).record
        with Trainer(record, tmp_path / name, cache=tmp_path / "prepared") as job:
            found = job.train()
            assert set(job.evaluate()) >= {"val_loss"}
        return found

    want, found = trained("resident", loss), trained("stored", stored)
    scores = {file.name: file.read_bytes() for file in store.iterdir()}
    assert set(scores) == {"index.json", "0.rows"}
    again = trained("again", stored)
    assert again["lm_loss"] == found["lm_loss"] == pytest.approx(want["lm_loss"], rel=1e-4)
    assert scores == {file.name: file.read_bytes() for file in store.iterdir()}
    api.export(tmp_path / "resident", tmp_path / "tuned")
    for changed, said in (
        ({"teacher": str(tmp_path / "tuned")}, "scored with teacher '"),
        ({"top_k": 8}, f"scored with top_k {vocab}, but this run has 8"),
        ({"temperature": 1.0}, r"scored with temperature 2\.0"),
    ):
        with pytest.raises(DataError, match=said):
            trained(said[:20], stored | changed)
    file.write_text("\n".join(json.dumps({"messages": one[:1] + turns[0][1:]}) for one in turns))
    with pytest.raises(DataError, match=r"document \d of chat was not scored"):
        trained("other data", stored)


def examples(count: int) -> list[dict[str, Any]]:
    """Pairs in both forms."""
    found = []
    for number in range(count):
        prompt = [{"role": "user", "content": f"expert {number}"}]
        answers = [[{"role": "assistant", "content": f"{w} {number}"}] for w in ("good", "bad")]
        whole = number % 2 == 1
        sides = [prompt + answer if whole else answer for answer in answers]
        found.append(dict(zip(PAIRS, sides, strict=True)) | ({} if whole else {"prompt": prompt}))
    return found


def source(folder: Path, examples: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    """The raw data of pairs."""
    write_chat_folder(folder / "model")
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, examples)))
    return {
        "seq": 64,
        "tokenizer": {"kind": "file", "path": str(folder / "model")},
        "train": [{"source": "preferences", "files": [str(file)], **how}],
    }


def prepared(folder: Path, examples: list[dict[str, Any]], **how: Any) -> Any:
    raw = source(folder, examples, **how)
    return prepare(load(Data, raw).record, folder / "prepared")


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "pair without a difference"),
        ({"prompt": "a", "chosen": "b"}, r"not a pair: it has \['chosen', 'prompt'\], but"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "without an answer: rejected is empty"),
        ({"prompt": "a", "chosen": "b" * 90, "rejected": "c"}, "a pair of .* raise data.seq"),
    ],
)
def test_pairs_that_cannot_be_used(tmp_path: Path, pair: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{said}"):
        prepared(tmp_path, [*examples(1), pair])


def run_of(folder: Path, loss: dict[str, Any], adapter: Any = None, pairs: bool = True) -> Run:
    raw = raw_run(folder, train={"steps": 8, "loss": loss})
    if pairs:
        raw["data"] = source(folder, examples(12), holdout=0.2)
    return load(Run, raw | ({"adapter": adapter} if adapter else {})).record


def test_losses_that_do_not_fit_a_run(tmp_path: Path) -> None:
    for loss, pairs, said in (
        ({"kind": "dpo"}, True, "train.loss.reference.*needs an adapter"),
        ({"kind": "dpo", "reference": "stored"}, False, "compares pairs of answers"),
        ({"kind": "cross_entropy"}, True, "cannot use the pairs of answers"),
        ({"kind": "distill", "teacher": "nowhere"}, False, "train.loss.teacher.*nowhere"),
    ):
        with pytest.raises(RunError, match=f"(?s){said}"):
            run_of(tmp_path, loss, pairs=pairs)
    raw = raw_run(tmp_path)
    data = source(tmp_path, examples(12))
    data["valid"] = [one | {"name": name} for one in data["train"] for name in "ab"]
    with pytest.raises(RunError) as caught:
        load(Run, raw | {"data": data | {"train": raw["data"]["train"]}})
    (rule,) = (item.rule for item in caught.value.violations if item.path == ("train", "loss"))
    assert rule == "cannot use the pairs of answers in data.valid"
    raw = raw_run(tmp_path, layout={"graphs": "step"}, train={"steps": 8, "loss": {"kind": "dpo"}})
    with pytest.raises(RunError, match=r"(?s)layout.graphs.*outside the step"):
        load(Run, raw)


def test_a_stored_reference_is_the_model_as_the_run_began(tmp_path: Path) -> None:
    """Also for a trainer that goes on later; answers are told apart better and better."""
    run = run_of(tmp_path, {"kind": "dpo", "reference": "stored"})
    with Trainer(run, tmp_path / "out", cache=tmp_path / "prepared") as job:
        first = job.step()
        assert first["preference/margin"] == 0.0
        job.save()
    with Trainer(run, tmp_path / "out", cache=tmp_path / "prepared") as job:
        last = job.train()
        said = job.evaluate()
    assert last["preference/margin"] > 0 and last["lm_loss"] < first["lm_loss"]
    assert set(said) == {"val_loss", *(f"val/preferences/{w}" for w in ("loss", *FIGURES))}
    (tmp_path / "out" / "reference.json").unlink()
    with (
        pytest.raises(ValueError, match="restore the file"),
        Trainer(run, tmp_path / "out", cache=tmp_path / "prepared") as job,
    ):
        job.evaluate()
    fork_folder = tmp_path / "fork"
    with Trainer(run, fork_folder, cache=tmp_path / "prepared", is_fork=True) as job:
        fork(job, tmp_path / "out")  # begins as what it takes, whose scores it stores
        assert job.evaluate()["val/preferences/preference/margin"] == 0.0


FIGURES = ("preference/margin", "preference/accuracy")


def test_a_teacher_is_read_from_its_folder(tmp_path: Path) -> None:
    """A student that begins as its teacher is where it should be; another one comes nearer."""
    with Trainer(load(Run, raw_run(tmp_path)).record, tmp_path / "base") as job:
        job.save()
    api.export(tmp_path / "base", hub := tmp_path / "hub")
    raw = raw_run(tmp_path, train={"steps": 8, "loss": {"kind": "distill", "teacher": str(hub)}})
    raw["data"]["tokenizer"] = {"kind": "file", "path": str(hub)}
    raw["model"] |= {"balance": []}
    like = raw | {"model": {"family": "folder", "from": str(hub), "balance": []}}
    with Trainer(load(Run, like).record, tmp_path / "like") as job:
        assert job.step()["lm_loss"] < 1e-6
    run = load(Run, raw | {"seed": 2}).record
    with Trainer(run, tmp_path / "other") as job:
        first, last = job.step(), job.train()
    assert 0 < last["lm_loss"] < 0.8 * first["lm_loss"]
    tokens = json.loads((hub / "tokenizer.json").read_text())
    other = tmp_path / "other tokens"
    other.mkdir()
    vocab = tokens["model"]["vocab"]
    (a, x), (b, y) = list(vocab.items())[-2:]
    tokens["model"]["vocab"] = vocab | {a: y, b: x}
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    (other / "tokenizer_config.json").write_text((hub / "tokenizer_config.json").read_text())
    raw["data"] |= {"tokenizer": {"kind": "file", "path": str(other)}}
    with (
        pytest.raises(DataError, match=r"the teacher's token .*both need one tokenizer"),
        Trainer(load(Run, raw).record, tmp_path / "refused") as job,
    ):
        job.step()
    raw["train"]["loss"] |= {"stored": "scores", "top_k": 301}
    with pytest.raises(RunError, match=r"(?s)300 tokens.*each epoch cuts text differently"):
        load(Run, raw)
    raw["train"]["loss"] |= {"stored": None, "top_k": 64}
    raw["data"] |= {"tokenizer": {"kind": "bpe", "vocab": 290}}
    with pytest.raises(RunError, match="vocabulary of 290 tokens, but has 300"):
        load(Run, raw)
